"""The part of a target's vocabulary that a head guesses of, read from its checkpoint: `d2t` [draft
vocabulary], of integers, that say how much larger the target's number of each token is, and `t2d`
[vocabulary], which says of each of the target's tokens whether it is among them. Load time only."""

from __future__ import annotations

import torch

from engine.errors import LoadError
from engine.speculation.heads.checkpoint import HeadCheckpoint

_INTEGERS = (torch.int64, torch.int32)
_FLAGS = (torch.bool, torch.uint8)


def read_vocabulary(
    checkpoint: HeadCheckpoint, num_drafted: int, vocab_size: int
) -> torch.Tensor | None:
    """[num_drafted] int64 on its device: the target's token for each logit; None: they are the
    same.

    Raises: LoadError for maps that are missing, of another shape or type, that lead out of the
        vocabulary or twice to one token, and that do not say the same.
    """
    if num_drafted > vocab_size:
        raise LoadError(
            f"{_says(checkpoint)} a draft vocabulary of {num_drafted}, this model's has "
            f"{vocab_size}; name heads that were made for it"
        )
    token_ids = torch.arange(num_drafted)
    if num_drafted < vocab_size or "d2t" in checkpoint.keys:
        token_ids = token_ids + checkpoint.exact("d2t", (num_drafted,), _INTEGERS).long()
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size:
        raise LoadError(f"{_says(checkpoint)} tokens in d2t that this model does not have")
    has = torch.zeros(vocab_size, dtype=torch.bool)
    has[token_ids] = True
    if int(has.sum()) < num_drafted:
        raise LoadError(f"{_says(checkpoint)} one token of this model twice in d2t")
    if "t2d" in checkpoint.keys:
        said = checkpoint.exact("t2d", (vocab_size,), _FLAGS).bool()
        if not torch.equal(said, has):
            raise LoadError(
                f"{_says(checkpoint)} other tokens in t2d than in d2t: {int((said != has).sum())} "
                "differ"
            )
    if torch.equal(token_ids, torch.arange(vocab_size)):
        return None
    return token_ids.to(checkpoint.device)


def _says(checkpoint: HeadCheckpoint) -> str:
    return f"speculation.draft_heads: {checkpoint.name} has"
