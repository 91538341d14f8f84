"""`baton up`: a cluster on this machine until Ctrl-C or SIGTERM; a second one ends it at once."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

import checkpoints
from baton import cluster_state, command_options, settings_check
from baton.cluster_config import DEFAULT_PORT, ClusterConfig
from baton.errors import ClusterError, ModelError
from baton.local_cluster import LocalCluster
from baton.start_view import StartView


def add_parser(commands: Any) -> None:
    """`baton up` and its options."""
    parser = commands.add_parser("up", help="start a cluster on this machine", description=__doc__)
    command_options.add_cluster(parser, default_port=DEFAULT_PORT)
    parser.add_argument(
        "--cluster",
        default="",
        metavar="NAME",
        help="by which your other commands choose this cluster, where you run several; default: "
        "the router's port",
    )
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Returns: 0 after a clean stop. Raises: ClusterError, ModelError."""
    config = command_options.cluster_of(parsed)
    if any(parsed.cluster == state.name for state in cluster_state.running()):
        raise ClusterError(f"--cluster {parsed.cluster}: another cluster of yours has this name")
    with running(config, parsed.cluster) as cluster, contextlib.suppress(KeyboardInterrupt):
        sys.stdout.write(_ready_lines(cluster))
        sys.stdout.flush()
        cluster.wait_failure()
    return 0


@contextlib.contextmanager
def running(config: ClusterConfig, name: str = "") -> Iterator[LocalCluster]:
    """A cluster that is announced to this user's other commands, and stopped at the end whatever
    happens; from the main thread only, for it takes the signals."""
    view = StartView(Console(stderr=True))
    cluster = LocalCluster(config, view.on_event)
    state: Path | None = None
    with _signals(cluster):
        try:
            settings_check.check(config)  # before a checkpoint is fetched
            with view:
                drafts = (config.draft_model,) * (config.num_draft > 0)
                for model in (*config.models, *drafts):
                    _check_model(model, view)
                cluster.start(settings_checked=True)
            certs = cluster.secured.certs
            state = cluster_state.announce(
                cluster.address,
                config.model,
                cluster.redis_url,
                tls_dir=str(certs.folder) if certs is not None else "",
                api_key=cluster.credentials.api_key,
                api_keys_file=cluster.secured.api_keys_file,
                autoscaler_address=cluster.autoscaler_address,
                http_address=cluster.http_address,
                name=name,
            )
            yield cluster
        finally:
            view.silence()
            if state is not None:
                state.unlink(missing_ok=True)
            cluster.stop()


def _check_model(model: str, view: StartView) -> None:
    """Fetch and check the checkpoint once, before several processes want it at the same time."""
    try:
        checkpoints.resolve(model, files="all", progress=view.on_fetch)
    except checkpoints.CheckpointError as error:
        raise ModelError(f"--model {error}") from error


@contextlib.contextmanager
def _signals(cluster: LocalCluster) -> Iterator[None]:
    """The first signal interrupts; any further one kills what still runs, and stays quiet."""
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
    """What clients other than this user's `baton` commands need."""
    secured, lines = cluster.secured, []
    if secured.certs is not None:
        lines.append(f"Clients trust the CA in {secured.certs.ca_file}")
    if secured.api_keys_file:
        lines.append("Clients need a key: baton api-key add --tenant NAME")
        lines.append(f"Keys are kept, as digests, in {secured.api_keys_file}")
    if not lines:
        return ""
    lines.append("The commands above find both by themselves.")
    return "\n".join(lines) + "\n"


def _access_lines(config: ClusterConfig) -> str:
    """Who else on this machine reaches what."""
    clients = (
        "The router's ports ask for an API key"
        if config.api_keys
        else "Any user of this machine may use the router's ports (--api-keys: only with a key)"
    )
    metrics = "Any user of this machine can read /metrics, over plain HTTP\n" * config.metrics
    nixl = (
        "; but NIXL opens loopback ports and abstract sockets, which take connections of any user\n"
        "of this machine and are protected by nothing but metadata that only our parts are told: "
        "a user\nwho guesses it can read and write KV. Where others use this machine take "
        "--transport shm or grpc"
        if config.uses_nixl
        else ""
    )
    return f"{clients}; only you can connect to the other parts{nixl}\n{metrics}"


def _left_lines(file_tier_dir: str) -> str:
    """Page files that lie there beside the folders of clusters. Earlier versions had theirs there,
    and left them; one may also be that of a store which is started by hand, so none is removed."""
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
