"""`baton up` and `baton demo`: a cluster on this machine, and its progress while it starts."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

import checkpoints
from baton.answers import Completion
from baton.cli import options, render
from baton.cli.cluster_options import cluster_config
from baton.cli.options import value
from baton.cluster import command_lines
from baton.cluster import running_clusters as cluster_state
from baton.cluster.config import ClusterConfig
from baton.cluster.local_cluster import LocalCluster
from baton.cluster.running_clusters import ClusterState
from baton.cluster.supervisor import ClusterEvent
from baton.errors import ClusterError, ModelError

_NOTEWORTHY = ("silent", "died", "restarting", "ready", "stopped")
"""Events that get a line once the cluster runs."""
_PROMPT = (
    "Once upon a time there was a little fox named Ruby who lived at the edge of a quiet forest. "
    "One morning she found a small silver key under the old oak tree."
)


@options.command("up")
@cluster_config()
@value(
    "--cluster",
    "NAME",
    "The name of the cluster, for the option --cluster of other commands. By default it is the "
    "router's port.",
    "",
    dest="name",
)
def up(config: ClusterConfig, name: str) -> None:
    """Run a cluster on this machine until Ctrl-C or SIGTERM; a second one ends it at once."""
    if any(name == state.name for state in cluster_state.running()):
        raise ClusterError(f"--cluster {name}: another cluster of yours has this name")
    with running(config, name) as cluster, contextlib.suppress(KeyboardInterrupt):
        sys.stdout.write(_ready_lines(cluster))
        sys.stdout.flush()
        cluster.wait_failure()


@options.command("demo")
@value("--prompt", "TEXT", "Send this prompt.", _PROMPT, show_default=False)
@value("--max-tokens", "N", "Generate at most N tokens.", 96)
@cluster_config(port=0)
def demo(prompt: str, max_tokens: int, config: ClusterConfig) -> None:
    """Start a cluster, send the same prompt twice, show where the KV came from, and stop it.

    The second time, the prompt's full blocks are in the caches. The demo fails if the answers
    differ, or if the decode worker computed a prompt token itself.
    """
    num_processes = config.num_workers + config.num_all_stores + 2
    with running(config) as cluster, cluster.connect() as client:
        names = ", ".join(cluster.processes)
        sys.stdout.write(f"{num_processes} processes: {names}\n\n> {prompt}\n\n")
        answers = []
        for title in ("", "The same again, its prefix cached:\n\n"):
            sys.stdout.write(title)
            chunks = client.generate(
                prompt,
                model=config.model if config.more_models else "",
                max_tokens=max_tokens,
                temperature=0.0,
            )
            answers.append(render.stream_with_provenance(chunks))
            sys.stdout.write("\n")
        _check(answers)
        sys.stdout.write("Both answers are equal, and decode computed no prompt token.\n")


def _check(answers: Sequence[Completion]) -> None:
    if answers[0].token_ids != answers[1].token_ids:
        raise ClusterError("the answers differ; this is a bug, please report it")
    for answer in answers:
        for leg in answer.provenance.legs:
            if leg.role == "decode" and leg.num_tokens_computed:
                raise ClusterError(
                    f"{leg.worker_id} computed {leg.num_tokens_computed} prompt tokens itself "
                    f"(reasons: {dict(leg.recomputed) or 'unknown'}); --log-dir keeps "
                    "the logs that say more"
                )


@contextlib.contextmanager
def running(config: ClusterConfig, name: str = "") -> Iterator[LocalCluster]:
    """Run a cluster that the user's other commands find, until the body ends; it is stopped in any
    case. It handles signals, so it runs in the main thread only."""
    view = StartView(Console(stderr=True))
    cluster = LocalCluster(config, view.on_event)
    announced: Path | None = None
    with _signals(cluster):
        try:
            command_lines.check_settings(config)  # before a checkpoint is fetched
            with view:
                drafts = (config.draft_model,) * (config.num_draft > 0)
                for model in (*config.models, *drafts):
                    _check_model(model, view)
                cluster.start(settings_checked=True)
            certs = cluster.secured.certs
            state = ClusterState(
                cluster.address,
                config.model,
                redis_url=cluster.redis_url,
                tls_dir=str(certs.folder) if certs is not None else "",
                api_key=cluster.credentials.api_key,
                api_keys_file=cluster.secured.api_keys_file,
                autoscaler_address=cluster.autoscaler_address,
                http_address=cluster.http_address,
                chosen_name=name,
            )
            announced = cluster_state.announce(state)
            yield cluster
        finally:
            view.silence()
            if announced is not None:
                announced.unlink(missing_ok=True)
            cluster.stop()


def _check_model(model: str, view: StartView) -> None:
    """Fetch and check the checkpoint once, before several processes do so at the same time."""
    try:
        checkpoints.resolve(model, files="all", progress=view.on_fetch)
    except checkpoints.CheckpointError as error:
        raise ModelError(f"--model {error}") from error


@contextlib.contextmanager
def _signals(cluster: LocalCluster) -> Iterator[None]:
    """The first signal raises KeyboardInterrupt; each further one kills all processes."""
    interrupted = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            cluster.kill_all()
            return
        interrupted = True
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _http_lines(cluster: LocalCluster) -> str:
    if not cluster.http_address:
        return ""
    scheme = "https" if cluster.config.tls else "http"
    base = f"{scheme}://{cluster.http_address}"
    return f"OpenAI's API: {base}/v1\nLive page: {base}/live\n"


def _trust_lines(cluster: LocalCluster) -> str:
    """What clients need, except the user's own `baton` commands."""
    secured, lines = cluster.secured, []
    if secured.certs is not None:
        lines.append(f"Clients trust the CA in {secured.certs.ca_file}")
    if secured.api_keys_file:
        lines.append("Clients need a key: baton api-key add --tenant NAME")
        lines.append(f"The digests of the keys are in {secured.api_keys_file}")
    if not lines:
        return ""
    lines.append("The commands above find the CA and an API key by themselves.")
    return "\n".join(lines) + "\n"


def _access_lines(config: ClusterConfig) -> str:
    """What other users of this machine can reach."""
    clients = (
        "The router's ports ask for an API key"
        if config.api_keys
        else "Any user of this machine may use the router's ports (--api-keys: only with a key)"
    )
    metrics = "Any user of this machine can read /metrics, over plain HTTP\n" * config.metrics
    nixl = (
        ". But NIXL opens loopback ports\nand abstract sockets, which accept connections of any "
        "user of this machine. Only the secret metadata of the\nparts protects them: a user that "
        "guesses it can read and write KV. On a shared machine use\n--transport shm or grpc"
        if config.uses_nixl
        else ""
    )
    return f"{clients}; only you can connect to the other parts{nixl}\n{metrics}"


def _left_lines(file_tier_dir: str) -> str:
    """Page files directly in that folder. Earlier versions left theirs there; but a store that was
    started by hand may use one, so none is removed."""
    if not file_tier_dir:
        return ""
    left = sorted(Path(file_tier_dir).glob("store*.baton-pages"))
    return "".join(
        f"{path} is not of this cluster; an earlier version of `baton up` leaves such a file: "
        "remove it if no store uses it\n"
        for path in left
    )


def _ready_lines(cluster: LocalCluster) -> str:
    config = cluster.config
    drafts = f", {config.num_draft} draft ({config.draft_model})" if config.num_draft else ""
    several = f", {config.num_all_stores} stores" if config.num_all_stores > 1 else ""
    which = f"--model {config.model} " if config.more_models else ""
    each = " each" if config.more_models else ""
    handover = f", handover {config.handover}" if config.handover != "auto" else ""
    traces = f"Traces of requests go to {config.trace_to}\n" if config.trace_to else ""
    autoscale = "  baton autoscale\n" if config.autoscale else ""
    scrape = f"prometheus --config.file={cluster.metrics_config}\n" if config.metrics else ""
    return (
        f"ready at {cluster.address}: {', '.join(config.models)}, {config.num_prefill} prefill, "
        f"{config.num_decode} decode{each}{drafts}{several} on {config.device}, "
        f"KV over {config.transport}{handover}\n"
        "In another terminal:\n"
        f'  baton generate {which}"Once upon a time"\n'
        "  baton chat\n"
        "  baton status\n"
        "  baton top\n"
        f"{autoscale}"
        f"{scrape and '  ' + scrape}"
        f"{traces}"
        f"{_http_lines(cluster)}"
        f"{_trust_lines(cluster)}"
        f"{_access_lines(config)}"
        f"{_left_lines(config.file_tier_dir)}"
        "Ctrl-C stops it.\n"
    )


class StartView:
    """Shows progress bars on a terminal while the cluster starts (inside `with`), and afterwards a
    line for each change. `on_event` may be called from any thread, as rich's displays allow.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[what]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._loading = False
        self._quiet = False

    def __enter__(self) -> Self:
        self._loading = True
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loading = False
        if self._console.is_terminal:
            self._progress.stop()

    def silence(self) -> None:
        """Print nothing more: the cluster is being stopped."""
        self._quiet = True

    def on_event(self, event: ClusterEvent) -> None:
        """Show an event of the cluster, such as a worker that is ready."""
        if self._quiet:
            return
        if self._loading and self._console.is_terminal:
            self._advance(event)
        elif event.what in _NOTEWORTHY and not (self._loading and event.what == "died"):
            # A death during the start is in the error that ends the start.
            detail = f": {event.detail}" if event.detail else ""
            self._console.print(f"{event.name} {event.what}{detail}", highlight=False, markup=False)

    def on_fetch(self, what: str, done: int, total: int) -> None:
        """Show the progress of fetching a checkpoint, in bytes."""
        self.on_event(ClusterEvent("checkpoint", "loading", what, done, total))

    def _advance(self, event: ClusterEvent) -> None:
        if event.name not in self._tasks:
            self._tasks[event.name] = self._progress.add_task(event.name, total=None, what="")
        task = self._tasks[event.name]
        if event.what == "loading":
            self._progress.update(
                task, completed=event.done, total=event.total or None, what=event.detail
            )
        elif event.what == "ready":
            self._progress.update(task, completed=1, total=1, what="ready")
        else:
            self._progress.update(task, what=event.what)
