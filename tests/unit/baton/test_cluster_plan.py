"""Command lines of a cluster, without starting anything."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from baton import ClusterConfig, cli
from baton.cli import up
from baton.cluster import command_lines as cluster_plan
from baton.cluster import config as cluster_config
from baton.cluster.command_lines import OPEN, ProcessSpec, WorkerSpec
from baton.errors import ClusterError
from engine.config import EngineConfig
from kvstore.config import KvStoreSettings
from process import settings
from services.autoscaler.config import AutoscalerSettings
from services.draft.config import DraftSettings
from services.router.config import RouterSettings
from services.worker.config import WorkerSettings


def _sets(spec: ProcessSpec) -> list[str]:
    argv = list(spec.argv)
    return [argv[i + 1] for i, word in enumerate(argv) if word == "--set"]


def config_of(*line: str) -> ClusterConfig:
    """What `baton up` would start."""
    asked = []

    def running(config: ClusterConfig, name: str) -> None:
        asked.append(config)
        raise ClusterError("only asked for")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(up, "running", running)
        assert cli.main(["up", *line]) == 1
    (config,) = asked
    return config


SOCKETS = Path("/x")


def _parts(num_stores: int = 1, draft_addresses: tuple[str, ...] = ()) -> WorkerSpec:
    stores = tuple(f"127.0.0.1:{i + 1}" for i in range(num_stores))
    return WorkerSpec("redis://x", stores, "/x/handle.keys", SOCKETS, OPEN, draft_addresses)


def _all(config: ClusterConfig) -> dict[str, ProcessSpec]:
    specs = [
        *cluster_plan.stores(config, redis_url="redis://x", sockets=SOCKETS, slab_dir="/m"),
        *cluster_plan.workers(config, _parts(config.num_all_stores)),
        cluster_plan.router(config, redis_url="redis://x", listen="127.0.0.1:0"),
    ]
    return {spec.name: spec for spec in specs}


def test_every_part_has_a_process_of_its_own() -> None:
    specs = _all(ClusterConfig(num_prefill=2, num_decode=3))
    assert list(specs) == [
        "store",
        "prefill-0",
        "prefill-1",
        "decode-0",
        "decode-1",
        "decode-2",
        "router",
    ]


def test_draft_workers_guess_for_decode_workers_alone() -> None:
    config = ClusterConfig(
        num_draft=2, draft_model="small", device="cuda:0,cuda:1", overrides=("draft.worker_id=x",)
    )
    specs = cluster_plan.drafts(config, sockets=SOCKETS)
    assert [(spec.name, spec.kind) for spec in specs] == [
        ("draft-0", "draft"),
        ("draft-1", "draft"),
    ]
    told = [settings.load(DraftSettings, overrides=_sets(spec)) for spec in specs]
    assert {one.engine.model for one in told} == {"small"}
    assert [one.engine.device for one in told] == ["cuda:0", "cuda:1"]
    assert told[0].worker_id == "x", "the user's own come last"
    assert [one.listen for one in told] == ["unix:/x/draft-0.sock", "unix:/x/draft-1.sock"]
    addresses = ("127.0.0.1:7", "unix:/x/draft-1.sock")
    for spec in cluster_plan.workers(config, _parts(draft_addresses=addresses)):
        worker = settings.load(WorkerSettings, overrides=_sets(spec))
        is_told = worker.engine.speculation.draft_workers == addresses
        assert is_told is (spec.kind == "decode")
    assert not cluster_plan.drafts(ClusterConfig(), sockets=SOCKETS)


def test_components_take_the_settings_we_give_them() -> None:
    """The other side of the seam: each command line loads into the component's own settings."""
    config = ClusterConfig(model='a "quoted" \\ model', transport="nixl")
    specs = _all(config)
    store = settings.load(KvStoreSettings, overrides=_sets(specs["store"]))
    assert (store.redis_url, store.slab_dir, store.node_id) == ("redis://x", "/m", "store")
    assert store.capacity_bytes == 0
    assert store.listen == "unix:/x/store.sock"
    for role in ("prefill", "decode"):
        worker = settings.load(WorkerSettings, overrides=_sets(specs[f"{role}-0"]))
        assert worker.worker_id == f"{role}-0"
        assert worker.listen == f"unix:/x/{role}-0.sock"
        assert worker.transport == "nixl"
        assert worker.store_address == "127.0.0.1:1"
        assert worker.handle_keys_file == "/x/handle.keys"
        assert worker.remote_transport == "nixl"
        assert isinstance(worker.engine, EngineConfig)
        assert worker.engine.model == config.model
        assert worker.engine.num_threads >= 1
    router = settings.load(RouterSettings, overrides=_sets(specs["router"]))
    assert (router.model, router.handover) == (config.model, "auto")


@pytest.mark.parametrize("handover", cluster_config.HANDOVERS)
def test_the_router_is_told_which_way_to_hand_over(handover: str) -> None:
    config = config_of("--handover", handover)
    router = settings.load(RouterSettings, overrides=_sets(_all(config)["router"]))
    assert config.handover == router.handover == handover


def test_every_part_is_told_where_traces_go() -> None:
    line = ["--trace-to", "127.0.0.1:4317", "--trace-ratio", "0.25"]
    specs = _all(config_of(*line))
    for name, kind in (
        ("router", RouterSettings),
        ("store", KvStoreSettings),
        ("prefill-0", WorkerSettings),
        ("decode-0", WorkerSettings),
    ):
        tracing = settings.load(kind, overrides=_sets(specs[name])).tracing
        assert (tracing.endpoint, tracing.sample_ratio) == ("127.0.0.1:4317", 0.25)
    assert not settings.load(
        RouterSettings, overrides=_sets(_all(ClusterConfig())["router"])
    ).tracing.endpoint
    for wrong in ({"trace_to": "4317"}, {"trace_to": "a:1", "trace_ratio": 1.5}):
        with pytest.raises(ClusterError, match="--trace-to"):
            ClusterConfig(**wrong)  # type: ignore[arg-type]


def test_prefill_workers_let_readers_map_their_cache_only_where_that_was_asked_for() -> None:
    for way, is_mapped in (("cuda_ipc", True), ("nixl", False), ("", False)):
        line = ["--device", "cuda:0,cuda:1", *(["--direct-transport", way] if way else [])]
        specs = _all(config_of(*line))
        prefill, decode = (
            settings.load(WorkerSettings, overrides=_sets(specs[f"{role}-0"]))
            for role in ("prefill", "decode")
        )
        assert prefill.direct_transport == decode.direct_transport == way
        assert (prefill.lend_mapped, decode.lend_mapped) == (is_mapped, False)
    with pytest.raises(ClusterError, match="--direct-transport pigeon: choose one of cuda_ipc"):
        ClusterConfig(direct_transport="pigeon")
    with pytest.raises(ClusterError, match=r"--direct-transport cuda_ipc: .* --device is cpu"):
        ClusterConfig(direct_transport="cuda_ipc")


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "num_stores", "homes"),
    [
        (1, 1, 1, [1, 1]),
        (1, 1, 2, [1, 2]),
        (2, 2, 2, [1, 2, 1, 2]),
        (2, 3, 2, [1, 2, 1, 2, 1]),
        (1, 2, 3, [1, 2, 3]),
    ],
)
def test_workers_are_dealt_to_the_stores_in_turn(
    num_prefill: int, num_decode: int, num_stores: int, homes: list[int]
) -> None:
    config = ClusterConfig(num_prefill=num_prefill, num_decode=num_decode, num_stores=num_stores)
    specs = _all(config)
    stores = [
        settings.load(KvStoreSettings, overrides=_sets(spec))
        for spec in specs.values()
        if spec.kind == "store"
    ]
    names = [store.node_id for store in stores]
    assert names == (["store"] if num_stores == 1 else [f"store-{i}" for i in range(num_stores)])
    assert all(name in specs for name in names)
    workers = [
        settings.load(WorkerSettings, overrides=_sets(spec))
        for spec in specs.values()
        if spec.kind in ("prefill", "decode")
    ]
    assert [worker.store_address for worker in workers] == [f"127.0.0.1:{i}" for i in homes]
    assert {worker.remote_transport for worker in workers} == {"grpc"}


@pytest.mark.parametrize(
    ("device", "taken"),
    [
        ("cpu", ["cpu"] * 4),
        ("cuda", ["cuda"] * 4),
        ("cuda:0,cuda:1", ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),
        ("cuda:2, cpu, cuda:0", ["cuda:2", "cpu", "cuda:0", "cuda:2"]),
    ],
)
def test_workers_are_dealt_to_the_devices_in_turn(device: str, taken: list[str]) -> None:
    specs = _all(ClusterConfig(num_prefill=1, num_decode=3, device=device))
    loaded = [
        settings.load(WorkerSettings, overrides=_sets(spec))
        for spec in specs.values()
        if spec.kind in ("prefill", "decode")
    ]
    assert [worker.worker_id for worker in loaded] == [
        "prefill-0",
        "decode-0",
        "decode-1",
        "decode-2",
    ]
    engines = [worker.engine for worker in loaded]
    assert all(isinstance(engine, EngineConfig) for engine in engines)
    assert [getattr(engine, "device", "") for engine in engines] == taken


@pytest.mark.parametrize(
    ("device", "shares"),
    [
        ("cuda", [0.45, 0.45]),
        ("cuda:0,cuda:1", [0.9, 0.9]),
        ("cpu", [0.9, 0.9]),
    ],
)
def test_workers_on_one_gpu_share_its_memory(device: str, shares: list[float]) -> None:
    specs = _all(ClusterConfig(device=device))
    engines = [
        settings.load(WorkerSettings, overrides=_sets(spec)).engine
        for spec in specs.values()
        if spec.kind in ("prefill", "decode")
    ]
    assert [getattr(engine, "memory_share", 0.0) for engine in engines] == shares
    specs = _all(ClusterConfig(device=device, overrides=("worker.engine.memory_share=0.3",)))
    told = specs["prefill-0"]
    loaded = settings.load(WorkerSettings, overrides=_sets(told)).engine
    assert getattr(loaded, "memory_share", 0.0) == 0.3


@pytest.mark.parametrize(
    ("device", "num_draft", "shares"),
    [
        ("cuda", 1, [0.4, 0.4]),
        ("cuda", 2, [0.36, 0.36]),
        ("cuda:0,cuda:1", 1, [0.72, 0.9]),
        ("cuda:0,cuda:1,cuda:2", 1, [0.9, 0.9]),
        ("cpu", 1, [0.9, 0.9]),
    ],
)
def test_draft_workers_have_a_part_of_their_gpu(
    device: str, num_draft: int, shares: list[float]
) -> None:
    """They load before the others, which would find less than they were told."""
    specs = _all(ClusterConfig(device=device, num_draft=num_draft))
    told = [
        settings.load(WorkerSettings, overrides=_sets(specs[name])).engine.memory_share
        for name in ("prefill-0", "decode-0")
    ]
    assert told == pytest.approx(shares)


def test_a_prefill_worker_that_may_become_a_decode_worker_knows_the_draft_workers() -> None:
    parts = _parts(draft_addresses=("127.0.0.1:7",))
    for autoscale, told in ((True, ("127.0.0.1:7",)), (False, ())):
        config = ClusterConfig(num_draft=1, autoscale=autoscale)
        spec = cluster_plan.numbered_worker(config, "prefill", 0, parts)
        worker = settings.load(WorkerSettings, overrides=_sets(spec))
        assert worker.engine.speculation.draft_workers == told


def test_a_workers_own_device_wins() -> None:
    config = ClusterConfig(device="cuda", overrides=('decode.engine.device="cuda:1"',))
    specs = _all(config)
    prefill = settings.load(WorkerSettings, overrides=_sets(specs["prefill-0"]))
    decode = settings.load(WorkerSettings, overrides=_sets(specs["decode-0"]))
    assert (prefill.engine.device, decode.engine.device) == ("cuda", "cuda:1")


def test_the_command_line_says_which_devices() -> None:
    assert config_of("--device", "cuda:0,cuda:1").devices == ("cuda:0", "cuda:1")


def test_the_command_line_says_how_many_stores() -> None:
    assert config_of("--stores", "2").num_stores == 2


_OPTIONS: dict[str, tuple[str, object]] = {
    "model": ("--model a", "a"),
    "more_models": ("--model baton-5m --model a --model b", ("a", "b")),
    "num_prefill": ("--prefill 2", 2),
    "num_decode": ("--decode 2", 2),
    "num_draft": ("--draft 1", 1),
    "draft_model": ("--draft-model a", "a"),
    "num_stores": ("--stores 2", 2),
    "transport": ("--transport grpc", "grpc"),
    "device": ("--device cpu,cpu", "cpu,cpu"),
    "handover": ("--handover store", "store"),
    "direct_transport": ("--direct-transport grpc", "grpc"),
    "port": ("--port 7", 7),
    "http_port": ("--http-port 7", 7),
    "redis_url": ("--redis redis://x", "redis://x"),
    "overrides": ("--set router.a=1 --set store.b=2", ("router.a=1", "store.b=2")),
    "tls": ("--tls", True),
    "api_keys": ("--api-keys", True),
    "metrics": ("--metrics", True),
    "trace_to": ("--trace-to x:1", "x:1"),
    "trace_ratio": ("--trace-ratio 0.5", 0.5),
    "autoscale": ("--autoscale", True),
    "num_prefill_min": ("--autoscale --min-prefill 0", 0),
    "num_prefill_max": ("--autoscale --max-prefill 5", 5),
    "num_decode_min": ("--autoscale --min-decode 0", 0),
    "num_decode_max": ("--autoscale --max-decode 5", 5),
    "log_dir": ("--log-dir logs", "logs"),
}


def test_each_field_has_an_option_of_the_same_default() -> None:
    assert config_of() == ClusterConfig()
    assert _OPTIONS.keys() == {field.name for field in dataclasses.fields(ClusterConfig)}
    for name, (line, value) in _OPTIONS.items():
        config = ClusterConfig(**{name: value, "autoscale": "--autoscale" in line})  # type: ignore[arg-type]
        assert config_of(*line.split()) == config


def test_overrides_reach_whom_they_name_and_win() -> None:
    config = ClusterConfig(
        overrides=(
            "worker.engine.block_size=32",
            "decode.engine.max_num_running=3",
            "store.capacity_bytes=4096",
            "router.router_id=me",
        )
    )
    specs = _all(config)
    prefill = settings.load(WorkerSettings, overrides=_sets(specs["prefill-0"]))
    decode = settings.load(WorkerSettings, overrides=_sets(specs["decode-0"]))
    assert (prefill.engine.block_size, decode.engine.block_size) == (32, 32)
    assert decode.engine.max_num_running == 3 != prefill.engine.max_num_running
    assert settings.load(KvStoreSettings, overrides=_sets(specs["store"])).capacity_bytes == 4096
    assert settings.load(RouterSettings, overrides=_sets(specs["router"])).router_id == "me"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"num_prefill": 0}, "--prefill 0"),
        ({"num_decode": -1}, "--decode -1"),
        ({"port": -1}, "--port -1"),
        ({"port": 65536}, "at most 65535"),
        ({"transport": "tcp"}, "shm, nixl, grpc"),
        ({"device": "gpu"}, "--device gpu: 'gpu' is none of cpu, cuda, cuda:N"),
        ({"device": "cuda:0,"}, "--device cuda:0,: '' is none of"),
        ({"device": "cpu,cuda:1", "transport": "nixl"}, "--transport nixl: .* use shm"),
        ({"num_stores": 0}, "--stores 0"),
        ({"num_draft": -1}, "--draft -1"),
        ({"num_draft": 1, "more_models": ("b",)}, "--draft: goes with one --model"),
        ({"num_stores": 3}, "--stores 3: at most one for each worker, which are 2"),
        ({"handover": "fast"}, "--handover fast: choose one of auto, store, direct"),
        *(
            (
                {"num_stores": 2, "overrides": (f"{key}=a",)},
                f"--set {key}=a: 2 stores cannot share it",
            )
            for key in ("store.node_id", "store.node_id ", "store.listen", "store.advertise")
        ),
        ({"overrides": ("wroker.x=1",)}, "nearest is 'worker'"),
        ({"overrides": ("worker",)}, "write it as worker.key=value"),
        ({"overrides": ("worker.x",)}, "write it as worker.key=value"),
    ],
)
def test_wrong_configuration_says_what_and_how(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ClusterError, match=says):
        ClusterConfig(**wrong)  # type: ignore[arg-type]


def test_redis_keeps_nothing_and_listens_on_no_port() -> None:
    argv = " ".join(cluster_plan.redis(Path("/bin/redis-server"), Path("/run/x/s")).argv)
    assert "--port 0" in argv and "--save  " in argv and "--unixsocketperm 700" in argv


def test_several_models_have_workers_and_stores_of_their_own() -> None:
    line = ["--model", "a", "--model", "b", "--prefill", "2", "--stores", "2"]
    config = config_of(*line)
    assert config.models == ("a", "b") and config.num_workers == 6
    specs = _all(config)
    assert [name for name in specs if name.startswith("store")] == [f"store-{i}" for i in range(4)]
    placed: dict[str, tuple[str, str]] = {}
    for name, spec in specs.items():
        if spec.kind in ("prefill", "decode"):
            worker = settings.load(WorkerSettings, overrides=_sets(spec))
            assert isinstance(worker.engine, EngineConfig) and worker.worker_id == name
            placed[name] = (worker.engine.model, worker.store_address)
    assert placed == {
        "prefill-0": ("a", "127.0.0.1:1"),
        "prefill-1": ("a", "127.0.0.1:2"),
        "prefill-2": ("b", "127.0.0.1:3"),
        "prefill-3": ("b", "127.0.0.1:4"),
        "decode-0": ("a", "127.0.0.1:1"),
        "decode-1": ("b", "127.0.0.1:3"),
    }
    router = settings.load(RouterSettings, overrides=_sets(specs["router"]))
    assert (router.model, router.models) == ("a", ("b",))


def test_one_model_is_not_named_to_the_router_twice() -> None:
    router = settings.load(RouterSettings, overrides=_sets(_all(ClusterConfig())["router"]))
    assert router.models == ()
    with pytest.raises(ClusterError, match="each model once"):
        ClusterConfig(model="a", more_models=("a",))


def test_an_autoscaler_is_told_its_bounds_and_the_router_to_hold() -> None:
    config = ClusterConfig(
        autoscale=True, num_prefill_min=0, num_prefill_max=3, num_decode_min=0, num_decode_max=5
    )
    spec = cluster_plan.autoscaler(
        config, redis_url="redis://x", sockets=SOCKETS, scale_address="unix:/x/y.sock"
    )
    made = settings.load(AutoscalerSettings, overrides=_sets(spec))
    assert (made.scaler, made.local_address) == ("local", "unix:/x/y.sock")
    limits = made.plan.limits
    assert (limits.prefill.min_workers, limits.prefill.max_workers) == (0, 3)
    assert (limits.decode.min_workers, limits.decode.max_workers) == (0, 5)
    router = settings.load(RouterSettings, overrides=_sets(_all(config)["router"]))
    assert router.hold_without_workers_s > 0
    quiet = settings.load(RouterSettings, overrides=_sets(_all(ClusterConfig())["router"]))
    assert quiet.hold_without_workers_s == 0


def test_a_router_that_may_be_without_workers_starts_when_they_are_there() -> None:
    """Before they say that they start it would take their model for scaled to zero, and /ready
    would say 200, then 503."""
    bounds = {"autoscale": True, "num_prefill_min": 0, "num_decode_min": 0}
    for config, expected in (
        (ClusterConfig(**bounds), [["prefill-0", "decode-0"], ["router"]]),
        (ClusterConfig(autoscale=True), [["prefill-0", "decode-0", "router"]]),
        (ClusterConfig(), [["prefill-0", "decode-0", "router"]]),
    ):
        parts = _all(config)
        groups = cluster_plan.in_turn(
            config, [parts["prefill-0"], parts["decode-0"]], parts["router"]
        )
        assert [[spec.name for spec in group] for group in groups] == expected


def test_a_worker_s_place_depends_on_its_number_alone() -> None:
    """Whichever workers there are when it is started: device, store and command line are the
    same."""
    config = ClusterConfig(
        autoscale=True, num_prefill=2, num_decode=2, num_stores=2, device="cuda:0,cuda:1"
    )
    parts = _parts(num_stores=2)
    for name, spec in _all(config).items():
        role, _, index = name.partition("-")
        if role in ("prefill", "decode"):
            assert cluster_plan.numbered_worker(config, role, int(index), parts) == spec
    first, second = (cluster_plan.numbered_worker(config, "decode", i, parts) for i in (0, 1))
    devices = {s for each in (first, second) for s in _sets(each) if "device=" in s}
    assert devices == {'engine.device="cuda:0"', 'engine.device="cuda:1"'}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"more_models": ("x",)}, "--autoscale: goes with one --model"),
        ({"num_prefill_min": 2, "num_prefill_max": 1}, "--min-prefill 2 --max-prefill 1"),
        ({"num_decode_min": 0, "num_decode_max": 0}, "--max-decode 0"),
        ({"num_decode": 9}, r"--decode 9: with --autoscale from --min-decode \(1\) to"),
    ],
)
def test_bounds_that_contradict_are_named(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ClusterError, match=says):
        ClusterConfig(autoscale=True, **changes)  # type: ignore[arg-type]


def test_a_part_is_waited_for_as_long_as_its_settings_let_it_drain() -> None:
    config = ClusterConfig(overrides=("router.times.drain_s=40", "worker.limits.drain_s = 7"))
    router = cluster_plan.router(config, redis_url="unix:///r", listen="127.0.0.1:0")
    assert router.drain_s == 40.0
    parts = cluster_plan.WorkerSpec("unix:///r", ("unix:///s",), "keys", Path("/run"))
    assert {worker.drain_s for worker in cluster_plan.workers(config, parts)} == {7.0}
    plain = cluster_plan.router(ClusterConfig(), redis_url="unix:///r", listen="127.0.0.1:0")
    assert plain.drain_s == cluster_plan.DRAIN_S


@pytest.mark.parametrize(("least", "holds"), [(0, True), (1, False)])
def test_only_a_cluster_that_may_have_no_worker_holds_requests_for_the_first(
    least: int, holds: bool
) -> None:
    """Its router is ready without workers; any other is ready when workers serve."""
    config = ClusterConfig(autoscale=True, num_prefill_min=least, num_decode_min=least)
    router = cluster_plan.router(config, redis_url="unix:///r", listen="127.0.0.1:0")
    assert any("hold_without_workers_s" in each for each in _sets(router)) == holds
