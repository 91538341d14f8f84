"""Whether a tenant can find out, by what the store answers it and how soon, that another tenant has
a prompt cached: a classifier that sees all of it does no better than a coin.

In each trial another tenant stores either the very prompt that is asked about or another one of the
same length, by the flip of a coin; then a stranger matches and puts that prompt under its own salt.
What it sees (times of both calls, hits, frames and their order) goes to a classifier that takes, of
all thresholds over all of it, the one that tells most on the first half of the trials; it is judged
by the second half. No time is compared with anything but other trials' of the same run, which are
interleaved with it. That the classifier finds a leak where there is one is tried, too: a stranger
with the other tenant's salt.

The limit is MAX_ACCURACY; 0.5 is a coin. With n held-out trials a coin is within 0.5 +- 1/sqrt(n)
in 19 of 20 cases: fewer than all of NUM_TRIALS say little, so this belongs to the long run.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from kvstore import block_hash, store_process
from tests.harness.store import FINGERPRINT, SETTINGS, Worker

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

MAX_ACCURACY = 0.55
NUM_TRIALS = 16_000
BLOCK_BYTES = 4096
BLOCK_SIZE = 16
NUM_BLOCKS = 4
_SETTINGS = dataclasses.replace(SETTINGS, capacity_bytes=256 * BLOCK_BYTES)


@dataclass(frozen=True)
class Trial:
    """is_present: the other tenant had stored the prompt. seen: numbers that a stranger saw."""

    is_present: bool
    seen: tuple[float, ...]


def _chain(salt: bytes, token_ids: Sequence[int]) -> list[bytes]:
    root = block_hash.root_key(salt, FINGERPRINT)
    return block_hash.chain(root, token_ids, BLOCK_SIZE)


async def _store(worker: Worker, chain: list[bytes]) -> None:
    put = await worker.put(chain, range(NUM_BLOCKS))
    await worker.release(put.lease_id)


async def _trial(
    rng: random.Random, other: Worker, stranger: Worker, salts: tuple[bytes, bytes]
) -> Trial:
    prompt, decoy = (
        [rng.randrange(2**16) for _ in range(NUM_BLOCKS * BLOCK_SIZE)] for _ in range(2)
    )
    is_present = rng.random() < 0.5
    await _store(other, _chain(salts[0], prompt if is_present else decoy))
    chain = _chain(salts[1], prompt)
    began_s = time.perf_counter()
    matched = await stranger.match(chain)
    matched_s = time.perf_counter()
    put = await stranger.put(chain, range(NUM_BLOCKS))
    put_s = time.perf_counter()
    await stranger.release(matched.lease_id, put.lease_id)
    frames = [ref.frame for ref in put.refs]
    steps = [after - before for before, after in itertools.pairwise(frames)]
    generations = [ref.generation for ref in put.refs]
    times = (matched_s - began_s, put_s - matched_s, put_s - began_s)
    answers = (len(matched.blocks), matched.num_hits, put.num_bytes, len(put.refs))
    return Trial(is_present, (*times, *answers, *frames, *steps, *generations))


def _accuracy(trials: Sequence[Trial]) -> float:
    """Of the best threshold of the first half, on the second half."""
    seen = np.array([trial.seen for trial in trials])
    truth = np.array([trial.is_present for trial in trials])
    half = len(trials) // 2
    best = (0.0, 0, 0.0, True)
    for column in range(seen.shape[1]):
        known = seen[:half, column]
        for threshold in np.unique(np.quantile(known, np.linspace(0.0, 1.0, 41))):
            share = float(np.mean((known >= threshold) == truth[:half]))
            best = max(best, (share, column, threshold, True))
            best = max(best, (1.0 - share, column, threshold, False))
    _, column, threshold, is_above = best
    guessed = (seen[half:, column] >= threshold) == is_above
    return float(np.mean(guessed == truth[half:]))


async def _measured(rng: random.Random, num_trials: int, salts: tuple[bytes, bytes]) -> float:
    async with store_process.running(_SETTINGS) as store:
        other = Worker("shm", BLOCK_BYTES, NUM_BLOCKS, 1)
        stranger = Worker("shm", BLOCK_BYTES, NUM_BLOCKS, 2)
        await other.attach(store.address)
        await stranger.attach(store.address)
        try:
            trials = [await _trial(rng, other, stranger, salts) for _ in range(num_trials)]
        finally:
            await other.client.close()
            await stranger.client.close()
        assert await store.node.check_integrity() == ""
    return _accuracy(trials)


@pytest.mark.long
async def test_no_answer_and_no_delay_tells_what_another_tenant_has(seed: int) -> None:
    rng = random.Random(f"{seed}-timing")
    figure = await _measured(rng, NUM_TRIALS, (b"one", b"another"))
    logger.info("accuracy on held-out calls: %.3f", figure)
    assert figure <= MAX_ACCURACY


async def test_the_classifier_finds_a_leak_where_there_is_one(seed: int) -> None:
    """A stranger with the same salt is no stranger."""
    rng = random.Random(f"{seed}-leak")
    assert await _measured(rng, 60, (b"one", b"one")) > 0.95
