"""Small tokenizers of the kinds that matter, made here so that no test needs a download."""

from __future__ import annotations

import string

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tokens.tokenizer import Tokenizer

TEXTS = (
    "Once upon a time a fox said: hello, hello!",
    "naïve café — 中文字 こんにちは 👩‍👩‍👧 é",
    "  two  spaces\n\nand\ttabs   ",
    '{"name": "Ada", "n": 12}',
    "\ufffd a real replacement character \ufffd\ufffd",
)


def byte_level() -> Tokenizer:
    """GPT-2 style byte-level BPE: every byte has a token, some merges, two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    # The last merge makes a token of one and a half characters: its text ends inside a character.
    for left, right in (("h", "e"), ("l", "l"), ("Ġ", "a"), ("he", "ll"), ("Ä", "ł"), ("Ã", "©")):
        vocabulary[left + right] = len(vocabulary)
        merges.append((left, right))
    vocabulary["oð"] = len(vocabulary)
    merges.append(("o", "ð"))
    backend = Backend(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|user|>"])
    backend.add_tokens([AddedToken("<think>", special=False)])
    return Tokenizer(backend)


def byte_fallback(*, strip: int = 1, metaspace: bool = False) -> Tokenizer:
    """Llama / SentencePiece style: `▁` for space, byte tokens for what has none."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for symbol in ["▁", "\n", *string.ascii_letters, *string.punctuation, "é", "\ufffd"]:
        vocabulary.setdefault(symbol, len(vocabulary))
    merges = []
    for left, right in (("▁", "a"), ("h", "e"), ("l", "l"), ("▁", "he"), ("▁", "▁")):
        vocabulary[left + right] = len(vocabulary)
        merges.append((left, right))
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
        backend.decoder = decoders.Sequence(
            [
                decoders.Metaspace(replacement="▁", prepend_scheme="first"),
                decoders.ByteFallback(),
            ]
        )
    else:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(
            [*steps, decoders.Strip(" ", strip, 0)] if strip else [*steps]
        )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend)


def word_piece() -> Tokenizer:
    """BERT style: `##` continues a word, spaces come from the decoder."""
    pieces = ["[UNK]", "fox", "##es", "##y", "the", ",", ".", "do", "n't", "'", "##s", "[SEP]"]
    backend = Backend(
        models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    backend.add_special_tokens(["[SEP]"])
    return Tokenizer(backend)


KINDS = {
    "byte_level": byte_level(),
    "byte_fallback": byte_fallback(),
    "byte_fallback_no_strip": byte_fallback(strip=0),
    # More than any window keeps: spaces in its context must not make it strip again.
    "byte_fallback_strip_many": byte_fallback(strip=12),
    "metaspace": byte_fallback(metaspace=True),
    "word_piece": word_piece(),
}
