"""Longest matched prefix first is depth-first over the radix tree of the prompts (Zheng et al.
2024, theorem 3.1): with a cache as large as the longest request, nothing is computed twice.

Stated for blocks: a block is an edge of `block_size` tokens, and what follows a prompt's last full
block is an edge of its own. Three things make it hold exactly. Requests run one at a time, as in
the proof (two at once would both compute what they have in common). No prompt ends on a block's
border: the last token of a prompt is always computed, so such a last block is not found even if it
is cached. And nobody is aged: `max_passes` bounds how long the cold wait, and costs recomputation.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.request import Request, Sampling
from engine.testing.fake_model import FakeModel
from tests.harness.engines import hasher

SIZE = 4


def _prompts(rng: random.Random) -> list[tuple[int, ...]]:
    """A random tree of prompts, some of them prefixes of others, in random order."""
    trunks: list[list[int]] = [[]]
    for _ in range(rng.randint(2, 14)):
        base = rng.choice(trunks)
        keep = rng.randint(0, len(base))
        trunks.append(base[:keep] + [rng.randrange(1, 97) for _ in range(rng.randint(1, 24))])
    prompts = [tuple(one[:60]) for one in trunks[1:]]
    prompts = [one if len(one) % SIZE else (*one, 5) for one in prompts]
    rng.shuffle(prompts)
    return prompts


def _num_edge_tokens(prompts: list[tuple[int, ...]]) -> int:
    """The sum over the tree's edges."""
    blocks = {
        prompt[: end + SIZE] for prompt in prompts for end in range(0, len(prompt) - SIZE + 1, SIZE)
    }
    return len(blocks) * SIZE + sum(len(prompt) % SIZE for prompt in prompts)


def _num_computed(
    prompts: list[tuple[int, ...]], num_blocks: int, policy: str, rng: random.Random
) -> tuple[int, list[str]]:
    config = EngineConfig(
        num_blocks=num_blocks,
        max_num_tokens_per_step=rng.randint(1, 64),
        max_num_running=1,
        policy=policy,
        max_passes=10_000,
    )
    engine = LLMEngine(config, FakeModel(context_window=num_blocks * SIZE, block_size=SIZE))
    for index, prompt in enumerate(prompts):
        engine.submit(Request(f"{index}", prompt, Sampling(max_tokens=1), hasher()))
    order = []
    while engine.has_work():
        order += [event.request_id for event in engine.step().events if event.token_ids]
        engine.check_integrity()
    assert len(order) == len(prompts)
    num_computed = engine.stats().num_computed_tokens
    # The hit rate, by its definition there: 1 - C / tokens to prefill.
    metrics = engine.metrics()
    assert abs(metrics.hit_rate - (1 - num_computed / sum(map(len, prompts)))) < 1e-9
    return num_computed, order


def test_cache_aware_order_computes_each_edge_once(seed: int, scale: Callable[[int], int]) -> None:
    num_worse = 0
    for index in range(scale(400)):
        rng = random.Random(f"{seed} {index}")
        prompts = _prompts(rng)
        longest = max(map(len, prompts))
        num_blocks = longest // SIZE + 1
        computed, _ = _num_computed(prompts, num_blocks, "cache_aware", rng)
        assert computed == _num_edge_tokens(prompts), (seed, index)
        in_order, _ = _num_computed(prompts, num_blocks, "fcfs", rng)
        assert in_order >= computed
        num_worse += in_order > computed
    assert num_worse > 0  # the order matters: first come first served computes more


def test_the_cold_go_after_at_most_max_passes_of_the_warm() -> None:
    for max_passes in (0, 1, 3):
        config = EngineConfig(
            num_blocks=64, max_num_running=1, policy="cache_aware", max_passes=max_passes
        )
        engine = LLMEngine(config, FakeModel(context_window=256, block_size=SIZE))
        warm = tuple(range(1, 18))
        engine.submit(Request("first", warm, Sampling(max_tokens=1), hasher()))
        engine.step()
        engine.submit(Request("cold", (90, 91, 92), Sampling(max_tokens=1), hasher()))
        order: list[str] = []
        for index in range(8):
            engine.submit(Request(f"{index}", warm, Sampling(max_tokens=1), hasher()))
            order += [event.request_id for event in engine.step().events if event.token_ids]
        assert order.index("cold") == max_passes
