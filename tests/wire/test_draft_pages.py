"""A draft model's own KV goes with a conversation and with a stream that moves: real decode workers
and a real store, with draft models whose guesses show each wrong byte."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.fake import FakeModel
from engine.speculation.config import SpeculationConfig
from engine.speculation.draft_model import DraftModel
from engine.speculation.draft_pages import PageCounts
from services.worker.config import WorkerLimits
from services.worker.draft_pages import StoreDraftPages
from services.worker.metrics import WorkerCollector
from tests.harness.decode_movers import (
    Movers,
    alone,
    going_on,
    movers,
    release_when_taken_out,
)
from tests.harness.gated_engine import BLOCK_SIZE, GatedModel, prompt_of
from tests.harness.prefill_decode_pair import LEASE_TTL_S, WAIT_S, Sample
from tests.harness.waiting import until

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
PROMPT = prompt_of(30, start=3)
LIMITS = WorkerLimits(
    store_wait_s=WAIT_S,
    lease_ttl_s=LEASE_TTL_S,
    attach_budget_s=WAIT_S,
    transfer_budget_s=WAIT_S,
    put_budget_s=WAIT_S,
    drain_s=0.2,
    stop_grace_s=0.05,
)
"""A transfer that is late on a busy machine is none that failed: tests count those."""


def make_engine(index: int, share_bytes: int = 1 << 16) -> LLMEngine:
    """Guessed for by a draft model that is always right, if its KV is. A page is one block."""
    speculation = SpeculationConfig(always=True, max_num_nodes=3, draft_share_bytes=share_bytes)
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=256,
        max_num_tokens_per_step=16,
        max_num_running=8,
        speculation=speculation,
    )
    draft = FakeModel(block_size=BLOCK_SIZE)
    drafter = DraftModel(draft, (1, 1, 1), num_blocks=256, max_num_tokens=16)
    return LLMEngine(config, GatedModel(), drafters=[drafter])


def pages_of(m: Movers, index: int) -> StoreDraftPages:
    pages: StoreDraftPages | None = m.workers[index].core.draft_pages
    assert pages is not None
    return pages


def counts_of(m: Movers, index: int) -> PageCounts:
    return pages_of(m, index).counts


async def believe(m: Movers, index: int) -> None:
    """Computing takes that worker's draft model very long, it thinks."""

    def tell(engine: Any) -> None:
        engine._speculator._roster._drafters[0]._share.choice.on_recomputed(1, 10.0)

    await m.workers[index].core.thread.call(tell)


async def collect(m: Movers, index: int, key: int) -> list[int]:
    sample = Sample()
    while not (event := await m.streams[index].next(key)).HasField("finished"):
        sample.add(event.tokens)
    sample.add(event.finished)
    return sample.token_ids


async def settled(m: Movers, index: int) -> None:
    """What it put is in the store, and nothing is on its way."""
    pages = pages_of(m, index)
    rows = pages.staging.rows
    await until(lambda: not pages._puts and rows.num_free == rows.num_rows)


async def test_the_next_turn_at_another_worker_goes_on_from_the_draft_models_kv(
    tmp_path: Path,
) -> None:
    """It comes while the request waits for its handover, so that guesses begin with the second
    token, and nothing of the conversation is computed again."""
    async with movers(tmp_path, make_engine=make_engine, limits=LIMITS) as m:
        answer = await collect(m, 0, await m.begin(0, PROMPT, max_tokens=20))
        assert answer == FakeModel(block_size=4).generate(PROMPT, 20)
        await settled(m, 0)
        num_put = counts_of(m, 0).num_put
        assert num_put >= (len(PROMPT) + 16) // BLOCK_SIZE
        used = m.store.node.store.table.frame_account.used
        assert set(used) == {"t"} and used["t"] >= num_put, "charged to the request's tenant"
        await believe(m, 1)
        context = (*PROMPT, *answer, *prompt_of(3, start=9))
        key = await m.streams[1].reserve(m.reserve(context, "turn 2", max_tokens=20))
        assert (await m.streams[1].next(key)).HasField("reserved")
        await until(lambda: counts_of(m, 1).num_fetched > 0)
        assert counts_of(m, 1).num_fetched == num_put
        before = (await m.workers[1].core.thread.call(lambda e: e.metrics())).num_guessed_tokens
        await m.streams[1].generate_from(key, alone())
        assert await collect(m, 1, key) == FakeModel(block_size=4).generate(context, 20)
        after = await m.workers[1].core.thread.call(lambda e: e.metrics())
        # Of 19 tokens after the first, three of four are guesses, from the first guess on.
        assert after.num_guessed_tokens - before >= 14
        assert after.num_kept_tokens == after.num_guessed_tokens
        num_new = len(context) + 1 - num_put * BLOCK_SIZE
        assert counts_of(m, 1).num_recomputed_tokens == (num_new if num_new >= BLOCK_SIZE else 0)
        await settled(m, 1)
        # What the first worker wrote is not written again.
        assert counts_of(m, 1).num_put <= (len(context) + 20) // BLOCK_SIZE - num_put
        await m.check()


async def test_a_stream_that_moves_finds_its_draft_models_kv(tmp_path: Path) -> None:
    """Seed, position and rule are all that its guesses go by, beside KV that the store has: so the
    handover carries no further state."""
    async with movers(tmp_path, make_engine=make_engine, limits=LIMITS) as m:
        await believe(m, 1)
        model, sample = m.engine(0)._model, Sample()
        model.hold_at(6)
        key = await m.begin(0, PROMPT, max_tokens=40)
        await until(model.is_held.is_set)
        release_when_taken_out(m, 0)
        m.leave(0)
        while not (event := await m.streams[0].next(key)).HasField("moved"):
            sample.add(event.tokens)
        m.stay(0)
        await settled(m, 0)
        assert counts_of(m, 0).num_put >= len(PROMPT) // BLOCK_SIZE
        stream = m.streams[1]
        key = await stream.reserve(m.reserve(PROMPT, "r", max_tokens=40))
        assert (await stream.next(key)).HasField("reserved")
        num_pages = len(PROMPT) // BLOCK_SIZE
        await until(lambda: counts_of(m, 1).num_fetched == num_pages)
        await stream.generate_from(key, going_on(event.moved, [sample]))
        sample.token_ids += await collect(m, 1, key)
        assert sample.token_ids == FakeModel(block_size=4).generate(PROMPT, 40)
        assert counts_of(m, 1).num_recomputed_tokens < num_pages * BLOCK_SIZE
        await m.check()


async def test_metrics_show_what_was_shared(tmp_path: Path) -> None:
    def make(index: int) -> LLMEngine:
        return make_engine(index, share_bytes=(1 << 16) * (1 - index))

    async with movers(tmp_path, make_engine=make, limits=LIMITS) as m:
        assert m.workers[1].core.draft_pages is None
        await collect(m, 0, await m.begin(0, PROMPT, max_tokens=20))
        await settled(m, 0)
        collector = WorkerCollector(m.workers[0].core, asyncio.get_running_loop())
        families = await asyncio.to_thread(lambda: list(collector.collect()))
        shown = {
            (sample.name, sample.labels.get("class", sample.labels.get("path"))): sample.value
            for family in families
            for sample in family.samples
        }
        counts = counts_of(m, 0)
        assert shown["baton_draft_pages_put_total", None] == counts.num_put > 0
        assert shown["baton_draft_pages_fetched_total", None] == counts.num_fetched == 0
        assert shown["baton_draft_choices_total", "recompute"] == 1
        assert shown["baton_draft_recomputed_tokens_total", None] >= len(PROMPT)
        assert shown["baton_draft_page_rows", "free"] == (1 << 16) // 32
        documented = DOCS.read_text(encoding="utf-8")
        names = {name for name, _ in shown if name.startswith("baton_draft_")}
        assert len(names) == 5 and all(f"| `{name}` |" in documented for name in names)
        await m.check()


async def test_a_worker_that_guesses_no_more_keeps_no_pages(tmp_path: Path) -> None:
    """Their memory would be held as long as the process lives."""
    async with movers(tmp_path, make_engine=make_engine) as m:
        made, engine = m.workers[0], m.engine(0)
        (drafter,) = engine._speculator._roster._drafters
        await collect(m, 0, await m.begin(0, PROMPT, max_tokens=20))
        await settled(m, 0)
        first = pages_of(m, 0)
        assert drafter._share._pages is first
        await made.set_role("prefill")
        assert made.core.draft_pages is None
        assert drafter._share is None and engine.draft_sharing._pages is None
        await made.core.thread.call(lambda engine: engine.check_integrity())
        await made.set_role("decode")
        again = pages_of(m, 0)
        assert again is not first and drafter._share._pages is again
        await made.core.thread.call(lambda engine: engine.check_integrity())
