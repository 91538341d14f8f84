"""A part is killed at any point of a load, a reload or an unload of an adapter: afterwards all is
as before or all is as asked, on every worker, and stays so."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton import cli
from baton.client import SyncClient
from baton.errors import BatonError, InvalidArgument
from baton.local_cluster import ClusterConfig, LocalCluster
from tests.conftest import LONG
from tests.harness.adapters import merged, save_adapter
from tests.harness.bundled_pair import MODEL
from tests.harness.cluster import Oracle, assert_idle, oracle, prompts

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(2300 if LONG else 600)]

VICTIMS = ("prefill-0", "decode-0", "router", "redis")
NUM_KILLS = 200
"""Of all victims together, in the long run."""
BUDGET_S = 90.0
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    config = ClusterConfig(
        port=0,
        model=MODEL,
        num_decode=2,
        # What a killed router had prepared is soon dropped.
        overrides=("worker.limits.lease_ttl_s=5.0", "router.times.adapter_s=30.0"),
    )
    with LocalCluster(config) as running:
        yield running
        assert_idle(running)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("adapters")
    return [save_adapter(base / str(seed), oracle(MODEL).model, seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return list(prompts(oracle(MODEL), random.Random(3), 1)[0])


@pytest.fixture(scope="module")
def expected(folders: list[Path], prompt: list[int]) -> list[list[int]]:
    """The answer of each content."""
    source = oracle(MODEL)
    answers = [
        Oracle(source.path, merged(source.model, folder), source.tokenizer).greedy(
            prompt, NUM_TOKENS
        )
        for folder in folders
    ]
    assert answers[0] != answers[1]
    return answers


@pytest.fixture(scope="module")
def changes(cluster: LocalCluster, folders: list[Path]) -> list[tuple[list[str], float]]:
    """Load, reload and unload as commands, each with the seconds that it takes undisturbed."""
    commands = [["load", "tales", str(folder)] for folder in folders] + [["unload", "tales"]]
    timed = []
    for command in commands:
        began_s = time.monotonic()
        assert _run(cluster, command) == 0
        timed.append((command, time.monotonic() - began_s))
    return timed


def _run(cluster: LocalCluster, command: list[str]) -> int:
    return cli.main(["adapter", *command, "--address", cluster.address])


def _ask(cluster: LocalCluster, prompt: list[int]) -> list[int]:
    """An answer; none: there is no such adapter. Retries while parts are away."""
    deadline_s = time.monotonic() + BUDGET_S
    while True:
        try:
            with SyncClient(cluster.address) as client:
                answer = client.complete(
                    prompt, adapter="tales", max_tokens=NUM_TOKENS, temperature=0.0, timeout_s=30.0
                )
                return list(answer.token_ids)
        except InvalidArgument:
            return []
        except BatonError:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)


def _contents(cluster: LocalCluster) -> list[set[str]] | None:
    """Digests of each worker; None: not all are there."""
    try:
        with SyncClient(cluster.address) as client:
            status = client.status()
    except BatonError:
        return None
    if len(status.workers) < 3 or not status.redis_reachable:
        return None
    return [{a.digest for a in w.adapters} for w in status.workers]


def _settle(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + BUDGET_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


@pytest.mark.parametrize("victim", VICTIMS)
def test_all_old_or_all_new(
    cluster: LocalCluster,
    changes: list[tuple[list[str], float]],
    prompt: list[int],
    expected: list[list[int]],
    victim: str,
    seed: int,
    scale: Callable[[int], int],
) -> None:
    rng = random.Random(f"{seed}{victim}")
    answers = [*expected, []]
    now = _ask(cluster, prompt)
    num_kills = max(3, scale(NUM_KILLS // len(VICTIMS)))
    num_within = 0
    for index in range(num_kills):
        (change, took_s), asked = changes[index % 3], answers[index % 3]
        codes: list[int] = []
        thread = threading.Thread(
            target=lambda codes=codes, change=change: codes.append(_run(cluster, change))
        )
        thread.start()
        time.sleep(rng.uniform(0.0, took_s))
        num_within += not codes
        cluster.kill(victim)
        thread.join(BUDGET_S)
        assert codes, f"{change} does not end"
        found = _ask(cluster, prompt)
        assert found == asked or (codes[0] != 0 and found == now)
        cluster.wait_ready(BUDGET_S)  # the killed worker's next life counts, too
        num = int(bool(found))
        _settle(lambda num=num: _are_alike(cluster, num))
        assert [_ask(cluster, prompt) for _ in range(4)] == [found] * 4
        now = found
    print(f"{victim}: {num_kills} kills, {num_within} before the change had ended")  # noqa: T201
    if now:
        assert _run(cluster, ["unload", "tales"]) == 0


def _are_alike(cluster: LocalCluster, num: int) -> bool:
    """Whether every worker has the same contents, and so many."""
    contents = _contents(cluster)
    return contents is not None and all(c == contents[0] and len(c) == num for c in contents)
