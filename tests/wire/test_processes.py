"""Services as the processes that a pod runs: they start, say by their probes how they are, serve,
stop, and fail with one line."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos import inference_pb2, inference_pb2_grpc
from tests.conftest import third
from tests.harness.redis_server import RedisServer
from tests.harness.router_bench import channel, save_tokenizer
from tests.harness.service_process import WAIT_S, ask, started
from tests.harness.waiting import block_until, until

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(2 * WAIT_S)]


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """One that is not started yet."""
    made = RedisServer()
    yield made
    made.remove()


def _checkpoint(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    save_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    return folder


async def test_a_router_is_ready_once_it_has_met_redis_and_serves_until_told_to_stop(
    tmp_path: Path, redis: RedisServer
) -> None:
    settings = f"model={_checkpoint(tmp_path)}", f"redis_url={redis.url}"
    with started("services.router", *settings) as router:
        router.until("/readyz", 503, "Redis")
        assert ask(router.address, "/livez") == (200, "ok")
        await redis.start()
        (ready,) = router.until_logged("ready")
        async with channel(ready["address"]) as connected:
            stub = inference_pb2_grpc.InferenceStub(connected)
            asked = inference_pb2.GetClusterStatusRequest()

            async def has_met_redis() -> bool:
                status = await stub.GetClusterStatus(asked, timeout=10)
                assert status.router_id == ready["router_id"]
                return bool(status.redis_reachable)

            await until(has_met_redis)
        assert router.end() == 0


async def test_an_autoscaler_decides_until_told_to_stop(tmp_path: Path, redis: RedisServer) -> None:
    """Nobody answers for the workers: it says so, changes nothing, and goes on."""
    await redis.start()
    with started(
        "services.autoscaler",
        f"redis_url={redis.url}",
        "scaler=local",
        f"local_address=unix:{tmp_path}/nobody.sock",
        "interval_s=0.05",
    ) as autoscaler:
        autoscaler.until_logged("ready")
        # Not the only one, where Redis is slow.
        why = "`baton up` does not scale its workers"
        block_until(lambda: why in str(autoscaler.logged("problem")), WAIT_S)
        assert ask(autoscaler.address, "/livez")[0] == 200
        assert autoscaler.end() == 0


def test_a_worker_lives_while_it_loads_and_is_ready_when_it_serves() -> None:
    settings = "engine.model=baton-5m", "engine.device=cpu", "redis_url="
    with started("services.prefill", *settings) as worker:
        worker.until("/readyz", 200)
        assert ("/livez", 200, "ok") in worker.seen
        why = {said[2] for said in worker.seen if said[:2] == ("/readyz", 503)}
        assert "loading the model" in why
        # How far it is may go by faster than anybody asks; it is told as it is logged.
        steps = worker.logged("loading")
        assert {"weights", "warm-up"} <= {step["what"] for step in steps}
        told = {f"loading the model: {s['what']}, {s['done']} of {s['total']}" for s in steps}
        assert why <= {"loading the model", *told}
        assert {said[1] for said in worker.seen if said[0] == "/livez"} <= {0, 200}
        assert worker.end() == 0


def test_a_store_is_ready_at_once(tmp_path: Path) -> None:
    with started("kvstore", f"slab_dir={json.dumps(str(tmp_path))}") as store:
        store.until("/readyz", 200)
        assert store.end() == 0


@pytest.mark.parametrize(
    ("service", "overrides", "word"),
    third(
        [
            ("router", (), "model: needed"),
            ("router", ("model=./no/such/folder",), "no such folder"),
            ("router", ("model={broken}",), "tokenizer"),
            ("router", ("model={good}", "modle=x"), "nearest is 'model'"),
            ("router", ("model={good}", "listen={busy}"), "cannot listen on 127.0.0.1:"),
            ("autoscaler", ("scaler=local",), "local_address: needed with scaler=local"),
            ("autoscaler", ("plan.limits.decode.max_wrokers=3",), "nearest is 'max_workers'"),
            ("autoscaler", (), "neither in a pod with a service account"),
        ]
    ),
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    service: str, overrides: tuple[str, ...], word: str, tmp_path: Path
) -> None:
    good, broken = _checkpoint(tmp_path / "good"), _checkpoint(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"good": good, "broken": broken, "busy": f"127.0.0.1:{taken.getsockname()[1]}"}
        wrong = [override.format(**names) for override in overrides]
        with started(f"services.{service}", *wrong) as process:
            assert process.ended() == 2
            log = process.log
    assert "Traceback" not in log
    (line,) = [line for line in log.splitlines() if line.startswith(f"{service}: ")]
    assert word in line
