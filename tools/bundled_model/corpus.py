"""The training corpus: an endless, seeded mix of stories, sums, JSON records and dialogues.

Every document is a pure function of `(seed, index)`, so any slice can be made again, in any
order and by any number of processes. `python -m tools.bundled_model.corpus` writes a sample.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tools.bundled_model import arithmetic, json_records
from tools.bundled_model.chat import (
    Message,
    make_dialogue,
    one_sentence_portrait,
    render,
)
from tools.bundled_model.small_talk import CAPITALS, MEANINGS
from tools.bundled_model.stories import make_long_story, make_story, title
from tools.bundled_model.vocabulary import pick

END = "<|end|>"

# The held-out documents are drawn from seeds that training never uses.
HELD_OUT = 1_000_003


@dataclass(frozen=True)
class Document:
    """One document of the corpus: what it is, and its text as the tokenizer sees it, without a
    final `END`. A dialogue keeps its messages too, and its text holds the special tokens of the
    template."""

    kind: str
    text: str
    messages: tuple[Message, ...] = ()


def make_document(seed: int, index: int) -> Document:
    """Make document number `index` of the corpus that belongs to `seed`."""
    rng = random.Random(f"{seed}/{index}")
    draw = rng.random()
    if draw < 0.72:
        messages = make_dialogue(rng)
        # The last END closes the document like every other one; the packer adds it.
        return Document("chat", render(messages).removesuffix(END), tuple(messages))
    if draw < 0.9:
        story = make_story(rng)
        heading = f"{title(story.cast)}\n\n" if rng.random() < 0.15 else ""
        return Document("story", heading + story.text)
    if draw < 0.91:
        return Document("long story", make_long_story(rng).text)
    if draw < 0.945:
        return Document("sums", arithmetic.sheet(rng))
    if draw < 0.97:
        return Document("records", json_records.page(rng))
    if draw < 0.98:
        country = pick(rng, tuple(CAPITALS))
        return Document("fact", f"The capital of {country} is {CAPITALS[country]}.")
    if draw < 0.99:
        return Document("fact", MEANINGS[pick(rng, tuple(MEANINGS))])
    return Document("portrait", one_sentence_portrait(rng))


def documents(seed: int, count: int, start: int = 0) -> Iterator[Document]:
    """Make documents `start` to `start + count` of the corpus of `seed`."""
    for index in range(start, start + count):
        yield make_document(seed, index)


def word_list(seed: int = 0, count: int = 4000) -> set[str]:
    """The words, in lower case, of a sample of the corpus: those that the model can be held to
    know."""
    words: set[str] = set()
    for document in documents(seed, count):
        words.update(split_words(document.text))
    return words


def split_words(text: str) -> list[str]:
    """Split `text` into words in lower case; digits and punctuation are dropped."""
    return re.findall(r"[a-z]+", text.lower())


def main() -> None:
    """Write a few documents to standard output."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    arguments = parser.parse_args()
    for document in documents(arguments.seed, arguments.count):
        sys.stdout.write(f"[{document.kind}]\n{document.text}\n\n")


if __name__ == "__main__":
    main()
