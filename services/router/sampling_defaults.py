"""What a sampling field means that the client left out: the model's own default, as `transformers`
would read it.

`generation_config.json` says so: with `do_sample` its temperature, top_p and top_k; without it (or
without the file) greedy. Workers always get every field. Pure but for one read of the file at
start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from checkpoints.errors import CheckpointError
from checkpoints.sampling_defaults import SamplingDefaults, read_sampling_defaults
from process.settings import SettingsError
from protos import common_pb2


def read_defaults(folder: Path) -> SamplingDefaults:
    """The defaults of the checkpoint in `folder`.

    Raises: SettingsError when `generation_config.json` is there but cannot be used.
    """
    try:
        return read_sampling_defaults(folder)
    except CheckpointError as error:
        raise SettingsError(str(error)) from error


ROUTERS_OWN = ("stop", "include_stop_text", "bad_words", "stop_at_tool_call")
"""Fields that only the router reads: they are about text."""


def fill(
    asked: common_pb2.SamplingParams,
    defaults: SamplingDefaults,
    *,
    max_tokens: int,
    seed: int,
    bad_words: Iterable[Sequence[int]] = (),
    stop_token_ids: Iterable[int] = (),
) -> common_pb2.SamplingParams:
    """`asked` with every field set that a worker reads; what only the router reads is left out.

    Args:
        bad_words: the words of `asked` as token ids, to join the sequences that it gives as ids.
        stop_token_ids: to join those of `asked`.
    """
    filled = common_pb2.SamplingParams()
    filled.CopyFrom(asked)
    is_searched = asked.HasField("beam")
    for name in ("temperature", "top_p", "top_k", "min_p"):
        if not asked.HasField(name):
            # Nothing is drawn in a beam search, whatever the model would have its draws like.
            source = SamplingDefaults() if is_searched else defaults
            setattr(filled, name, getattr(source, name))
    filled.max_tokens = max_tokens
    filled.seed = seed
    filled.n = asked.n or 1
    for ids in bad_words:
        filled.bad_word_ids.add(ids=ids)
    filled.stop_token_ids.extend(stop_token_ids)
    for name in ROUTERS_OWN:
        filled.ClearField(name)
    return filled
