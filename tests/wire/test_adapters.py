"""LoRA adapters over the real wire: loaded at start and at run time, equal to merged weights, keyed
by content. With the small bundled model, because the fake one has no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch

from process.errors import FailedPrecondition, InvalidArgument, NotFound
from protos import common_pb2, prefill_pb2
from tests.harness.adapters import merged, save_adapter
from tests.harness.bundled_pair import MODEL, PROMPT, WAIT_S, Workers, workers
from tests.harness.cluster import oracle
from tests.harness.prefill_decode_pair import PrefillCall, whole
from tests.harness.router_bench import error_from_rpc

pytestmark = pytest.mark.oracle

NUM_TOKENS = 8


async def _generate(w: Workers, adapter: str, digest: str, *, name: str) -> list[int]:
    (sample,) = (
        await w.generate(adapter=adapter, digest=digest, name=name, max_tokens=NUM_TOKENS)
    ).values()
    return sample.token_ids


def _reference(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            logits = model(ids).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    tokens: Sequence[int] = ids[0, len(PROMPT) :].tolist()
    return list(tokens)


@pytest.fixture(scope="module")
def base() -> Any:
    return oracle(MODEL).model


async def test_each_request_has_its_adapter_and_no_other(tmp_path: Path, base: Any) -> None:
    folders = {
        name: save_adapter(tmp_path / name, base, index) for index, name in enumerate("ab", 1)
    }
    expected = {name: _reference(merged(base, folder)) for name, folder in folders.items()}
    expected[""] = _reference(base)
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    async with workers(tmp_path, f"a={folders['a']}") as w:
        (digest_b, same) = await w.load("b", folders["b"])
        assert digest_b == same
        statuses = [
            await stub.GetWorkerStatus(common_pb2.GetWorkerStatusRequest(), timeout=WAIT_S)
            for stub in w.stubs
        ]
        digests = {adapter.name: adapter.digest for adapter in statuses[0].adapters}
        assert digests == {adapter.name: adapter.digest for adapter in statuses[1].adapters}
        assert digests["b"] == digest_b and all(s.integrity_error == "" for s in statuses)
        for attempt in range(2):  # the second time from the caches
            for name in ("a", "", "b"):
                tokens = await _generate(w, name, digests.get(name, ""), name=f"{name}{attempt}")
                assert tokens == expected[name]


async def test_a_reload_under_the_same_name_never_meets_old_kv(tmp_path: Path, base: Any) -> None:
    old = save_adapter(tmp_path / "old", base, 1)
    new = save_adapter(tmp_path / "new", base, 2)
    expected = {folder: _reference(merged(base, folder)) for folder in (old, new)}
    async with workers(tmp_path, f"x={old}") as w:
        (before, _) = await w.load("x", old)
        assert await _generate(w, "x", before, name="one") == expected[old]
        (after, _) = await w.load("x", new)
        assert after != before
        assert await _generate(w, "x", after, name="two") == expected[new]
        # Requests that began with the old content end on it.
        assert await _generate(w, "x", before, name="three") == expected[old]
        # A router that knows another one is told, and may try another worker.
        request = prefill_pb2.PrefillRequest(**w.fields(PROMPT, "stale", "x", "ab" * 32))
        with pytest.raises(FailedPrecondition):
            await whole(PrefillCall(w.stubs[0], request, timeout_s=WAIT_S))


async def test_the_models_own_name_is_refused(tmp_path: Path, base: Any) -> None:
    folder = save_adapter(tmp_path / "a", base, 1)
    async with workers(tmp_path) as w:
        for stub in w.stubs:
            request = common_pb2.LoadAdapterRequest(name=MODEL, folder=str(folder))
            with pytest.raises(grpc.aio.AioRpcError, match=f"{MODEL}' is the served model"):
                await stub.LoadAdapter(request, timeout=WAIT_S)
        assert not w.prefill.core.status().adapters


async def test_what_is_no_adapter_is_refused_by_its_file(tmp_path: Path) -> None:
    async with workers(tmp_path) as w:
        for stub in w.stubs:
            for call, kind in (
                (
                    stub.LoadAdapter(
                        common_pb2.LoadAdapterRequest(name="x", folder=str(tmp_path / "none")),
                        timeout=WAIT_S,
                    ),
                    InvalidArgument,
                ),
                (
                    stub.UnloadAdapter(common_pb2.UnloadAdapterRequest(name="x"), timeout=WAIT_S),
                    NotFound,
                ),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert isinstance(error_from_rpc(caught.value), kind)
