"""StoreParking under an engine: requests whose blocks were parked go on to the same tokens, with or
without their bytes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.errors import WrongState
from engine.outputs import StepOutput
from tests.harness.gated_engine import GatedModel, fake_engine, prompt_of, request, running
from tests.harness.waiting import until
from tests.harness.workloads import PLAIN, disturbed, undisturbed, workload
from tests.unit.worker.parking_bench import lot


def tokens_of(outputs: list[StepOutput], name: str) -> list[int]:
    events = [event for output in outputs for event in output.events]
    return [token for event in events if event.request_id == name for token in event.token_ids]


def park(engine: LLMEngine, model: GatedModel) -> None:
    """Preempt `a` in an engine without room for it, and stop at the next forward pass."""
    stats = engine.stats()
    num_blocks = stats.num_free_blocks + stats.num_cached_blocks
    engine.reserve(request(engine, prompt_of(4 * num_blocks, 50), name="room", max_tokens=4))
    model.hold()
    engine.preempt("a")


@pytest.mark.parametrize("transport", ["shm", "nixl", "grpc"])
@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_parked_request_goes_on_to_the_same_tokens_with_or_without_its_bytes(
    is_killed: bool, transport: str, tmp_path: Path
) -> None:
    model = GatedModel()
    engine = fake_engine(num_blocks=64, model=model, preemption="swap")
    outputs: list[StepOutput] = []
    layout, bytes_there = engine.kv.layout, engine.park_bytes
    assert bytes_there == 64 * layout.block_bytes
    async with running(engine, on_step=outputs.append, idle_check_s=10) as thread:
        async with lot(
            tmp_path, transport=transport, num_rows=64, layout=layout, thread=thread
        ) as made:
            await thread.call(lambda e: e.use_parking(made.parking))
            first = request(engine, prompt_of(22), name="a", max_tokens=20)
            other = request(engine, prompt_of(3, 9), name="d", max_tokens=20)

            def begin(e: Any) -> None:
                for asked in (first, other):
                    e.reserve(asked)
                    e.start(asked.request_id)
                with pytest.raises(WrongState):
                    e.use_parking(made.parking)
                outputs.extend(e.step() for _ in range(6))
                park(e, model)

            await thread.call(begin)
            await made.stored("a/0")
            assert made.store.num_tails == 1
            if is_killed:
                await made.kill_store()
            thread.post(lambda e: e.abort("room"))
            model.release()
            await until(lambda: len(tokens_of(outputs, "a")) + len(tokens_of(outputs, "d")) == 40)
            assert tokens_of(outputs, "a") == model.generate(prompt_of(22), 20)
            assert tokens_of(outputs, "d") == model.generate(prompt_of(3, 9), 20)
            causes = dict((await thread.call(lambda e: e.stats())).num_preemptions)
            assert causes["swap"] == 1 and causes.get("lost", 0) == int(is_killed)
            assert (made.parking.num_bytes_fetched == 0) is is_killed
            await thread.call(lambda e: e.check_integrity())
            if not is_killed:
                await made.check_empty()


async def test_random_workloads_with_a_store_are_told_nothing_of_it(
    tmp_path: Path, seed: int, scale: Callable[[int], int]
) -> None:
    """200 random workloads on hardly any blocks, preempted at random: outcomes equal the
    undisturbed run, and every law holds after every step."""
    causes: Counter[str] = Counter()
    layout = PLAIN.make_model().layout
    async with lot(tmp_path, num_rows=20, num_frames=40, layout=layout) as made:
        for index in range(scale(200)):
            rng = random.Random(f"{seed} {index}")
            config = EngineConfig(
                num_blocks=rng.randint(12, 20),
                max_num_tokens_per_step=rng.randint(4, 12),
                max_num_running=4,
                preemption="swap",
            )
            engine = PLAIN.engine(config)
            engine.use_parking(made.parking)
            requests = workload(rng)
            found = await asyncio.to_thread(disturbed, engine, requests, rng)
            assert found == undisturbed(requests), index
            causes.update(dict(engine.stats().num_preemptions))
        assert causes["swap"] > 0 and made.parking.num_bytes_stored > 0
        assert causes["lost"] == sum(made.parking.lost.values())
        await made.check_empty()


def test_a_parking_is_for_an_engine_that_swaps() -> None:
    engine = fake_engine(num_blocks=64, preemption="recompute")
    assert engine.park_bytes == 0
    with pytest.raises(WrongState, match="swaps"):
        engine.use_parking(None)  # type: ignore[arg-type]
