"""From documents to training windows: one long stream of tokens and where its documents begin."""

from __future__ import annotations

import itertools
import multiprocessing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from tools.bundled_model.corpus import documents
from tools.bundled_model.tokenizer import END_ID

_CHUNK = 4096


@dataclass(frozen=True)
class TokenStream:
    """Documents joined by the end token; `starts` holds the offset of each document."""

    tokens: npt.NDArray[np.uint16]
    starts: npt.NDArray[np.int64]


def _encode_chunk(
    tokenizer_path: str, seed: int, start: int
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]:
    """The tokens of one chunk of documents end to end, and the length of each document."""
    tokenizer = Tokenizer.from_file(tokenizer_path)
    texts = [document.text for document in documents(seed, _CHUNK, start)]
    ids = [[*encoding.ids, END_ID] for encoding in tokenizer.encode_batch(texts)]
    joined = np.fromiter(itertools.chain.from_iterable(ids), dtype=np.uint16)
    return joined, np.array([len(document) for document in ids], dtype=np.int64)


def build_stream(tokenizer_path: Path, seed: int, count: int, workers: int) -> TokenStream:
    """Join the first `count` documents of `seed`, rounded up to whole chunks. The order of the
    documents is that of their index, whatever the number of workers."""
    encode = partial(_encode_chunk, str(tokenizer_path), seed)
    parts: list[npt.NDArray[np.uint16]] = []
    lengths: list[npt.NDArray[np.int64]] = []
    # spawn: the tokenizers library keeps threads that a forked child would inherit broken.
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for tokens, counts in pool.imap(encode, range(0, count, _CHUNK)):
            parts.append(tokens)
            lengths.append(counts)
    ends = np.cumsum(np.concatenate(lengths))
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])
    return TokenStream(np.concatenate(parts), starts)


def sample_windows(
    stream: TokenStream, rng: np.random.Generator, batch: int, length: int
) -> torch.Tensor:
    """Draw a batch of windows, `[batch, length + 1]`: inputs and, shifted by one, their targets.

    Half of the windows begin with a document, as a prompt does. The others begin anywhere, so that
    a prompt cut out of the middle of something is no surprise either. All of them run across
    document borders, which is what trains every position up to `length`.
    """
    last = len(stream.tokens) - length - 1
    starts = rng.integers(0, last + 1, size=batch)
    aligned = stream.starts[rng.integers(0, len(stream.starts), size=batch)]
    starts[::2] = np.minimum(aligned, last)[::2]
    index = starts[:, None] + np.arange(length + 1)[None, :]
    return torch.from_numpy(stream.tokens[index].astype(np.int64))
