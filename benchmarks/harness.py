"""What all benchmarks share: options, the context of a result, timing of ways beside one another,
ceilings, tables, child processes, and the JSON object that is the last line of each.

A benchmark is a function that returns its figures, wrapped by `case`; `program` makes several of
them one command. `--out FILE` writes the last line to a file as well. Nothing else is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import inspect
import itertools
import json
import multiprocessing
import os
import platform
import shlex
import socket
import statistics
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

CONSOLE = Console(stderr=True, width=160, highlight=False)
"""Console on standard error for tables and progress: the last line on standard output is for
programs."""

COMMIT = "BATON_BENCHMARK_COMMIT"
"""Environment variable with the commit of a tree that was copied here without its history, as `git
describe --always --dirty` says it where the history is."""

_UNTOLD = ("--out", "--plot", "--timeline")
"""Options that name files: where a result lies says nothing of it."""


# -- options


class Several(click.ParamType[tuple[Any, ...]]):
    """Type of an option with several values, separated by commas: `--batches 1,8,64`."""

    name = "several"

    def __init__(self, of: Any) -> None:
        self._of = click.types.convert_type(of)
        self.name = f"{self._of.name},..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        if not isinstance(value, str):
            return tuple(value)
        return tuple(self._of.convert(each, param, ctx) for each in value.split(",") if each)


def case(measure: Callable[..., Mapping[str, Any]]) -> click.Command:
    """Make a command that measures and publishes. The function's docstring is its help, click's
    options on it are its arguments, and what it returns are its figures."""

    @functools.wraps(measure)
    def run(*, out: Path | None, **options: Any) -> None:
        figures = measure(**options)
        publish({"benchmark": _benchmark(), **context(), **figures}, out)

    out = click.option("--out", type=click.Path(path_type=Path), help="a file for the last line")
    settings = {"show_default": True, "help_option_names": ["-h", "--help"]}
    name = measure.__name__.strip("_").replace("_", "-")
    return click.command(name, help=inspect.getdoc(measure), context_settings=settings)(out(run))


def program(doc: str | None, *commands: click.Command) -> click.Group:
    """Join several cases under one name: `python -m benchmarks.NAME CASE`. In `--help` indented
    lines and lists of `doc` keep their line breaks, so that the commands in it can be copied."""
    settings = {"help_option_names": ["-h", "--help"]}
    paragraphs = (doc or "").strip().split("\n\n")
    shown = "\n\n".join(
        f"\b\n{each}" if each.startswith(("    ", "- ")) else each for each in paragraphs
    )
    return click.Group(commands=list(commands), help=shown, context_settings=settings)


def needs_cuda(num_devices: int = 1) -> None:
    """Check that there are CUDA devices. Raises: click.UsageError when torch finds fewer than
    wanted."""
    import torch

    found = torch.cuda.device_count()
    if found < num_devices:
        raise click.UsageError(f"needs {num_devices} CUDA device(s), torch finds {found}")


# -- results


def context() -> dict[str, str]:
    """The context of a result: commit, command, hardware and Python of this run. Holds no path of
    this machine."""
    arguments = list(sys.argv[1:])
    for option in _UNTOLD:
        if option in arguments:
            at = arguments.index(option)
            del arguments[at : at + 2]
    return {
        "commit": _commit(),
        "command": shlex.join(["python", "-m", _module(), *arguments]),
        "hardware": f"{os.cpu_count()} cores, {_processor()}",
        "python": platform.python_version(),
        "load_average": f"{os.getloadavg()[0]:.1f}",
    }


def device_context(device: str = "cuda") -> dict[str, Any]:
    """The context of a result on a device: torch's version, and the device."""
    import torch

    name = torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"
    return {"device": name, "num_devices": torch.cuda.device_count(), "torch": torch.__version__}


def publish(result: Mapping[str, Any], out: Path | None) -> None:
    """Print a result as one line of JSON, the last on standard output, and write it into a file if
    one is named."""
    line = json.dumps(result)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(line + "\n", encoding="utf-8")
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _benchmark() -> str:
    """The program, and the case if it has several: `kernels linear`."""
    current = click.get_current_context()
    names = [_module().removeprefix("benchmarks.")]
    if current.parent is not None:
        names.append(current.info_name or "")
    return " ".join(names)


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec is not None else f"benchmarks.{Path(sys.argv[0]).stem}"


def _commit() -> str:
    if known := os.environ.get(COMMIT):
        return known
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    values = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    features = set(values.get("flags", "").split())
    wide = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in features]
    return f"{values.get('model name', platform.machine())} ({', '.join(wide)})"


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table on standard error; its columns are the keys of all rows, in order."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(title=title)
    for at, column in enumerate(columns):
        table.add_column(column, justify="right" if at else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(column, "")) for column in columns))
    CONSOLE.print(table)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def attempt(
    name: str, row: Callable[..., Mapping[str, Any]], *arguments: Any, **options: Any
) -> dict[str, Any]:
    """Compute one row of a table. A row that fails says why, and hides no other."""
    try:
        return {"case": name, **row(*arguments, **options)}
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return {"case": name, "failed": f"{type(error).__name__}: {lines[0][:200]}"}


# -- timing


def interleaved(
    ways: Mapping[str, Callable[[], float]], num_rounds: int, num_warm_ups: int = 0
) -> dict[str, list[float]]:
    """Measure several ways in rounds. Ways take turns, in the reverse order every other round, so
    that drift of the machine hits all of them alike. Returns: each way's figure of each round."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(num_warm_ups + num_rounds):
        for name in reversed(list(ways)) if number % 2 else ways:
            value = ways[name]()
            if number >= num_warm_ups:
                found[name].append(value)
    return found


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """Make a way of `interleaved` of a piece of work: its figure is its seconds on the wall
    clock."""

    def run() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return run


def median_s(work: Callable[[], object], num_rounds: int, num_warm_ups: int = 2) -> float:
    """Median seconds of one call, on the wall clock."""
    return statistics.median(interleaved({"": timed(work)}, num_rounds, num_warm_ups)[""])


def cuts(values: Sequence[float], unit: str = "ms", scale: float = 1e3) -> dict[str, float]:
    """Summarize values: how many, p50, p99 and the longest; in seconds unless `scale` says
    otherwise."""
    if len(values) < 2:
        return {"num": len(values)}
    found = statistics.quantiles(values, n=100, method="inclusive")
    return {
        "num": len(values),
        f"p50_{unit}": round(found[49] * scale, 3),
        f"p99_{unit}": round(found[98] * scale, 3),
        f"longest_{unit}": round(max(values) * scale, 3),
    }


# -- timing of a CUDA device. torch is imported where it is needed: half of them need none.

_CACHE_BYTES = 200 << 20
"""Sets of buffers together are more than this: four times an H100's L2."""


def num_sets(set_bytes: int, most: int = 64) -> int:
    """Number of sets of buffers that take turns, so that nothing is timed from a cache that would
    not hold it in real life."""
    return max(2, min(most, -(-_CACHE_BYTES // max(1, set_bytes))))


def event_s(work: Callable[[], object], num_rounds: int = 10, num_warm_ups: int = 2) -> float:
    """Median seconds of one call on a CUDA device, between two events on the stream."""
    import torch

    for _ in range(num_warm_ups):
        work()
    times: list[float] = []
    for _ in range(num_rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def graph_s(launch: Callable[[int], object], num_launches: int = 40, num_replays: int = 7) -> float:
    """Seconds of one launch on a CUDA device: the median replay of a CUDA graph of launch(0),
    launch(1), ..."""
    import torch

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(min(2, num_launches)):
            launch(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(num_launches):
            launch(index)
    return event_s(graph.replay, num_replays, num_warm_ups=1) / num_launches


def stream_s(launch: Callable[[int], object], num_launches: int = 8, num_rounds: int = 3) -> float:
    """Seconds of one launch on a CUDA device, without a graph: for long ones, and what cannot be
    captured."""
    import torch

    launch(0)
    launch(1)
    torch.cuda.synchronize()

    def launches() -> None:
        for index in range(num_launches):
            launch(index)

    return event_s(launches, num_rounds, num_warm_ups=0) / num_launches


def device_ceilings() -> dict[str, float]:
    """Measure the ceilings of a device: copy_gb_per_s (bytes read and written), read_gb_per_s,
    matmul_tflop_per_s (bfloat16, random numbers, 8192 x 8192 x 8192)."""
    import torch

    num_bytes = 2 << 30
    source = torch.randn(num_bytes // 4, device="cuda")
    target = torch.empty_like(source)
    # By a kernel: `copy_` may be given to the copy engine, which is slower.
    copy_s = event_s(lambda: torch.neg(source, out=target))
    read_s = event_s(lambda: source.max())
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul_s = event_s(lambda: a @ b)
    return {
        "copy_gb_per_s": 2 * num_bytes / copy_s / 1e9,
        "read_gb_per_s": num_bytes / read_s / 1e9,
        "matmul_tflop_per_s": 2 * 8192**3 / matmul_s / 1e12,
    }


# -- requests of an engine without a store


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """A chain hash of a block, by its parent's."""
    return hashlib.blake2b(array("I", token_ids).tobytes(), key=parent, digest_size=16).digest()


# -- ceilings of a host


def host_read_gb_per_s() -> float:
    """Measure the rate of reading 1 GiB of host memory with torch, the best of a second."""
    import torch

    data = torch.ones(1 << 27, dtype=torch.int64)
    best, end = 0.0, time.perf_counter() + 1.0
    while time.perf_counter() < end:
        began = time.perf_counter()
        data.sum()
        best = max(best, data.numel() * 8 / (time.perf_counter() - began) / 1e9)
    return best


_TCP_S = 60.0


@contextlib.contextmanager
def tcp_stream(num_bytes: int) -> Iterator[Callable[[], float]]:
    """Send bytes over a plain TCP stream on loopback to a process of its own. Returns: seconds
    until all have crossed: what a byte costs that crosses sockets. No framing, no checks: a ceiling
    for whatever moves blocks over a socket."""
    data = bytes(num_bytes)
    # A fresh interpreter: a fork would share our memory and its page tables.
    spawning = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_TCP_S)
        peer = spawning.Process(target=_receive, args=(server.getsockname(), num_bytes))
        peer.start()
        connection = server.accept()[0]

    def send() -> float:
        began = time.perf_counter()
        connection.sendall(data)
        if connection.recv(1) != b"k":
            raise ConnectionError("the peer of the TCP stream has ended")
        return time.perf_counter() - began

    with connection:
        _tune(connection)
        yield send
    peer.join(_TCP_S)


def _receive(address: tuple[str, int], num_bytes: int) -> None:
    """The peer: answers each transfer with a byte, until the connection ends."""
    view = memoryview(bytearray(num_bytes))
    with socket.create_connection(address, _TCP_S) as connection:
        _tune(connection)
        left = num_bytes
        while count := connection.recv_into(view[:left]):
            left -= count
            if not left:
                connection.sendall(b"k")
                left = num_bytes


def _tune(connection: socket.socket) -> None:
    connection.settimeout(_TCP_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, 4 << 20)


# -- child processes


@contextlib.contextmanager
def child(*argv: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a process until the end of the block; it is killed if it does not go."""
    environment = os.environ | {"BATON_PARENT_PID": str(os.getpid())}
    with subprocess.Popen(argv, text=True, env=environment, **options) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()


def module(name: str, *arguments: str) -> tuple[str, ...]:
    """The command line that runs a module of this tree."""
    return (sys.executable, "-m", name, *arguments)


@contextlib.contextmanager
def service(name: str, **settings: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Run a process of Baton (`kvstore`, `services.router`) from its ready line on.

    Args: settings: as of `--set`, a double underscore for each dot.
    Yields: its process id, and the fields of its ready line.
    Raises: RuntimeError with its last lines when it does not start.
    """
    arguments: list[str] = []
    for key, value in settings.items():
        written = json.dumps(value) if isinstance(value, str) else str(value)
        arguments += ["--set", f"{key.replace('__', '.')}={written}"]
    lines: list[str] = []
    fields: dict[str, Any] = {}
    has_started = threading.Event()
    with child(*module(name, *arguments), stderr=subprocess.PIPE) as process:

        def read() -> None:
            assert process.stderr is not None
            for line in process.stderr:
                lines.append(line)
                with contextlib.suppress(ValueError):
                    found = json.loads(line)
                    if found.get("event") == "ready":
                        fields.update(found)
                        has_started.set()
            has_started.set()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        if not has_started.wait(60.0) or not fields:
            raise RuntimeError(f"{name} did not start: {''.join(lines[-5:])}")
        yield process.pid, fields


def store(**settings: str | int) -> contextlib.AbstractContextManager[tuple[int, dict[str, Any]]]:
    """Run a KV store on this machine; `address` of its ready line is what a client attaches to."""
    return service("kvstore", **{"listen": "127.0.0.1:0", **settings})


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- one stream of a worker

Came = tuple[Any, float]
"""An event of a stream, and the monotonic clock's seconds when it came."""


class KeyedStream:
    """One multiplexed stream to a worker of either role, as a bare router has it: commands go out
    under keys of their own, and events come back by key.

    Args:
        call: of a stub's `Stream`.
        command: the class of what goes out.
    """

    def __init__(self, call: Any, command: Any) -> None:
        self._call = call
        self._command = command
        self._keys = itertools.count(1)
        self._queues: dict[int, asyncio.Queue[Came]] = {}
        self._writing = asyncio.Lock()
        self._reader = asyncio.create_task(self._read())

    def open(self) -> tuple[int, asyncio.Queue[Came]]:
        """Make a new key. Returns: the key, and the queue of its events."""
        key = next(self._keys)
        self._queues[key] = asyncio.Queue()
        return key, self._queues[key]

    def close(self, key: int) -> None:
        """Drop the events that still come under a key."""
        del self._queues[key]

    async def send(self, key: int, **fields: Any) -> None:
        """Send one command under a key."""
        async with self._writing:
            await self._call.write(self._command(key=key, **fields))

    async def end(self) -> None:
        """Break the stream."""
        self._call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        import grpc.aio

        with contextlib.suppress(grpc.aio.AioRpcError):  # the worker ends first
            while (message := await self._call.read()) is not grpc.aio.EOF:
                came_s = time.monotonic()
                for event in message.events:
                    if event.key in self._queues:
                        self._queues[event.key].put_nowait((event, came_s))
