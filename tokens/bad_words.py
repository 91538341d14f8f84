"""Words that shall not appear, as the token id sequences that would spell them.

A tokenizer spells a word in one way at the beginning of a text and in another behind a space, so
each word gives both. Other spellings (the word cut into rarer tokens) are not found: the model
draws tokens, and only the tokenizer's own spelling of a word is the word. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokens.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[tuple[int, ...]]:
    """The id sequences of `words`, each once, in their order.

    A sequence that another one begins with or ends with itself is kept all the same: which of them
    forbids a token makes no difference. Raises: ValueError for a word without tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        core = word.strip()
        spellings = [
            tuple(tokenizer.encode(prefix + core, add_special_tokens=False)) for prefix in ("", " ")
        ]
        if not all(spellings):
            raise ValueError(f"{word!r} has no tokens")
        found.update(dict.fromkeys(spellings))
    return list(found)
