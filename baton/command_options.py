"""Options that several commands share, and what they mean."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

from baton import cluster_config, cluster_state
from baton.cert_set import CertSet
from baton.client import SyncClient
from baton.cluster_config import ClusterConfig
from baton.cluster_state import ClusterState
from baton.credentials import Credentials
from baton.errors import ClusterError, InvalidArgument, Unavailable
from process import secret_file
from process.access import Role
from process.redis_client import RedisAccess
from process.serving import Dialer
from process.tls import TlsSettings

_MAX_KEY_BYTES = 4096


def add_address(parser: argparse.ArgumentParser) -> None:
    """`--address`, `--cluster`."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="the router's; default: the cluster that `baton up` started last",
    )
    add_cluster_name(where)
    add_credentials(parser)


def add_cluster_name(where: argparse._ActionsContainer) -> None:
    """`--cluster`."""
    where.add_argument(
        "--cluster",
        default="",
        metavar="NAME",
        help="of several that you started here: as `baton up --cluster` named it, or its router's "
        "port",
    )


def state_of(parsed: argparse.Namespace) -> ClusterState | None:
    """The cluster of this user that is meant; None: there is none, or the address is another's.
    Where several run and none is named, says once which one is taken.

    Raises: Unavailable for a name that none has.
    """
    address = getattr(parsed, "address", None) or ""
    if address:
        return cluster_state.find(address)
    running = cluster_state.running()
    if parsed.cluster:
        for state in reversed(running):
            if state.name == parsed.cluster:
                return state
        names = ", ".join(state.name for state in running) or "none"
        raise Unavailable(f"--cluster {parsed.cluster}: of your clusters here run: {names}")
    if len(running) > 1 and not getattr(parsed, "has_told_cluster", False):
        parsed.has_told_cluster = True
        *others, taken = (state.name for state in running)
        sys.stderr.write(
            f"cluster {taken} is taken, which was started last; --cluster NAME chooses another: "
            f"{', '.join(others)}\n"
        )
    return running[-1] if running else None


def add_credentials(parser: argparse.ArgumentParser, *, has_tls: bool = False) -> None:
    """How a cluster that is not `baton up`'s is known, and knows its user. `has_tls`: the command
    has an option --tls already."""
    group = parser.add_argument_group("trust; of a cluster that `baton up` started all is known")
    if not has_tls:
        group.add_argument(
            "--tls", action="store_true", help="over TLS, trusting this machine's CAs"
        )
    group.add_argument("--ca-file", default="", metavar="FILE", help="over TLS, trusting these CAs")
    group.add_argument("--cert-file", default="", metavar="FILE", help="your certificate")
    group.add_argument("--key-file", default="", metavar="FILE", help="its private key")
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="holds your API key; default: the variable BATON_API_KEY",
    )


def address_of(parsed: argparse.Namespace) -> str:
    """The router to speak to.

    Raises: Unavailable when none is named and none runs; InvalidArgument for the HTTP port of a
    cluster of this user.
    """
    state = state_of(parsed)
    if parsed.address:
        address = str(parsed.address)
        if state is not None and _port(address) == _port(state.http_address):
            raise InvalidArgument(
                "--address", f"{address} is the HTTP port; gRPC is at {state.address}"
            )
        return address
    if state is None:
        raise Unavailable(
            "no cluster of yours runs here; start one with `baton up`, or give --address"
        )
    return state.address


def credentials_of(parsed: argparse.Namespace) -> Credentials:
    """What to show that router: what the options say; else, for a cluster of this user, named by
    its address or the last one, its own.

    Raises: SettingsError, InvalidArgument for files that do not do.
    """
    is_elsewhere = not parsed.address and bool(getattr(parsed, "redis", ""))
    state = None if is_elsewhere else state_of(parsed)
    api_key = os.environ.get("BATON_API_KEY", "") or (state.api_key if state else "")
    if parsed.api_key_file is not None:
        content = secret_file.read(
            parsed.api_key_file,
            what="--api-key-file",
            max_bytes=_MAX_KEY_BYTES,
            fix="write your API key into it",
        )
        api_key = content.decode(errors="replace").strip()
    if not (api_key.isascii() and api_key.isprintable()):
        raise InvalidArgument("--api-key-file", "holds no API key")
    tls: TlsSettings | None = None
    if parsed.tls or parsed.ca_file or parsed.cert_file:
        tls = TlsSettings(parsed.ca_file, parsed.cert_file, parsed.key_file)
    elif state is not None and state.tls_dir:
        tls = CertSet(Path(state.tls_dir)).tls_of(Role.ADMIN)
    return Credentials(tls, api_key)


def client_of(parsed: argparse.Namespace) -> SyncClient:
    """A client of that router. Raises: Unavailable, SettingsError, InvalidArgument."""
    return SyncClient(address_of(parsed), credentials_of(parsed))


def dialer_of(parsed: argparse.Namespace) -> Dialer:
    """How to reach the cluster's workers and stores, as an admin; as `credentials_of`."""
    return Dialer(credentials_of(parsed).identity())


def add_redis(parser: argparse.ArgumentParser) -> None:
    """`--redis`, and `--address` of one of this user's clusters, which says where its Redis is."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="the router's, of a cluster that you started here; default: the one started last",
    )
    add_cluster_name(where)
    where.add_argument(
        "--redis", default="", metavar="URL", help="the Redis of a cluster that runs elsewhere"
    )
    group = parser.add_argument_group("trust of that Redis, as the settings redis.* of its parts")
    for name, meaning in (
        ("ca-file", "over TLS (rediss://), trusting these CAs"),
        ("cert-file", "your certificate, for a Redis that asks for one"),
        ("key-file", "its private key"),
        ("password-file", "holds the password"),
    ):
        group.add_argument(f"--redis-{name}", default="", metavar="FILE", help=meaning)
    group.add_argument("--redis-user", default="", metavar="NAME", help="default: Redis' own")
    add_credentials(parser)


def redis_access_of(parsed: argparse.Namespace) -> RedisAccess:
    """How that Redis is known, and knows its user. Raises: SettingsError."""
    return RedisAccess(
        ca_file=parsed.redis_ca_file,
        cert_file=parsed.redis_cert_file,
        key_file=parsed.redis_key_file,
        user=parsed.redis_user,
        password_file=parsed.redis_password_file,
    )


def redis_url_of(parsed: argparse.Namespace) -> str:
    """Raises: Unavailable when there is no cluster of this user to say it."""
    if parsed.redis:
        return str(parsed.redis)
    state = state_of(parsed)
    if state is not None and state.redis_url:
        return state.redis_url
    if parsed.address:
        raise Unavailable(f"no cluster of yours runs at {parsed.address}; give --redis URL instead")
    raise Unavailable(
        "no cluster of yours runs here; start one with `baton up`, or give --redis URL"
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """The options that say how tokens are drawn. What is not given is the model's default."""
    group = parser.add_argument_group("sampling (default: as the model says)")
    group.add_argument("--max-tokens", type=int, default=128, metavar="N", help="default: 128")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; repeatable"
    )
    parser.add_argument("--model", default="", help="which model, where several are served")
    parser.add_argument("--tenant", default="")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=120.0,
        metavar="SECONDS",
        help="for the whole answer; default: 120",
    )


def add_shaping(parser: argparse.ArgumentParser) -> None:
    """Options beyond the usual: samples, penalties, what the output must look like."""
    group = parser.add_argument_group("samples")
    group.add_argument("-n", type=int, default=1, metavar="N", help="samples of the prompt")
    group.add_argument("--num-beams", type=int, default=1, metavar="N", help="beam search")
    group.add_argument("--length-penalty", type=float, metavar="P", help="of a beam search")
    group.add_argument(
        "--early-stopping", action="store_true", help="of a beam search: end with N finished ones"
    )
    group = parser.add_argument_group("what may be drawn")
    group.add_argument("--min-tokens", type=int, default=0, metavar="N")
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="P")
    group.add_argument("--frequency-penalty", type=float, default=0.0, metavar="P")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="P")
    group.add_argument("--no-repeat-ngram", type=int, default=0, metavar="N")
    group.add_argument(
        "--logit-bias",
        action="append",
        default=[],
        type=_bias,
        metavar="TOKEN=BIAS",
        help="added to a token's logit; repeatable",
    )
    group.add_argument(
        "--allowed-token",
        action="append",
        type=int,
        metavar="TOKEN",
        help="only these tokens; repeatable",
    )
    group.add_argument(
        "--bad-word", action="append", default=[], metavar="TEXT", help="never; repeatable"
    )
    group.add_argument("--ignore-eos", action="store_true")
    group.add_argument("--include-stop-text", action="store_true")
    group.add_argument("--adapter", default="", metavar="NAME", help="a loaded LoRA adapter")
    grammar = parser.add_mutually_exclusive_group()
    grammar.add_argument("--json-schema", metavar="JSON", help="the output is such JSON")
    grammar.add_argument("--regex", metavar="PATTERN", help="the output matches it")
    grammar.add_argument(
        "--ebnf",
        metavar="GRAMMAR",
        help="the output is of this grammar: Lark (start: ...) or GBNF (root ::= ...)",
    )
    grammar.add_argument(
        "--choice", action="append", metavar="TEXT", help="one of these outputs; repeatable"
    )


def shaping_of(parsed: argparse.Namespace) -> dict[str, Any]:
    """Those options as keywords of `Client.generate`."""
    names = (
        *("n", "num_beams", "length_penalty", "early_stopping", "min_tokens", "presence_penalty"),
        *("frequency_penalty", "repetition_penalty", "no_repeat_ngram", "ignore_eos"),
        *("include_stop_text", "adapter", "json_schema", "regex", "ebnf", "choice"),
    )
    return {
        **{name: getattr(parsed, name) for name in names},
        "logit_bias": dict(parsed.logit_bias),
        "allowed_token_ids": parsed.allowed_token,
        "bad_words": parsed.bad_word,
    }


def sampling_of(parsed: argparse.Namespace) -> dict[str, Any]:
    """Those options as keywords of `Client.generate`."""
    return {
        "max_tokens": parsed.max_tokens,
        "temperature": parsed.temperature,
        "top_p": parsed.top_p,
        "top_k": parsed.top_k,
        "min_p": parsed.min_p,
        "seed": parsed.seed,
        "stop": parsed.stop,
        "model": parsed.model,
        "tenant": parsed.tenant,
        "timeout_s": parsed.timeout,
    }


def add_cluster(parser: argparse.ArgumentParser, *, default_port: int) -> None:
    """The options that say what a local cluster consists of."""
    defaults = ClusterConfig()
    parser.add_argument(
        "--model",
        action=_Models,
        default=defaults.model,
        help="bundled name, folder with a checkpoint, or Hugging Face name (name@revision); given "
        f"again: further models, each with its own workers; default: {defaults.model}",
    )
    parser.set_defaults(more_models=())
    for name, least, what in (
        ("--prefill", 1, "prefill workers of each model"),
        ("--decode", 1, "decode workers of each model"),
        ("--draft", 0, "draft workers, which guess for the decode workers; default: 0"),
    ):
        parser.add_argument(name, type=int, default=least, metavar="N", help=what)
    parser.add_argument(
        "--draft-model",
        default=defaults.draft_model,
        help=f"what they serve, with the tokenizer of --model; default: {defaults.draft_model}",
    )
    parser.add_argument(
        "--stores",
        type=int,
        default=1,
        metavar="N",
        help="KV stores of each model; workers are dealt to them in turn, as if each were a "
        "machine; default: 1",
    )
    parser.add_argument(
        "--transport",
        choices=cluster_config.TRANSPORTS,
        default=defaults.transport,
        help="how KV blocks travel between workers and store; default: shm",
    )
    parser.add_argument(
        "--device",
        default=defaults.device,
        metavar="DEVICE[,...]",
        help="where workers compute: cpu, cuda or cuda:N; several are dealt to the workers in "
        f"turn; default: {defaults.device}",
    )
    parser.add_argument(
        "--handover",
        choices=cluster_config.HANDOVERS,
        default=defaults.handover,
        help="how a prompt's KV gets from prefill to decode: through the store, directly out of "
        "the prefill worker's cache, or the cheaper way; default: auto",
    )
    parser.add_argument(
        "--direct-transport",
        choices=cluster_config.DIRECT_TRANSPORTS,
        default=defaults.direct_transport,
        help="how blocks are read out of a prefill worker's cache; cuda_ipc: mapped, between GPUs "
        "of this machine; default: as from other nodes' stores",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=default_port,
        help=f"the router's, on loopback; 0: a free one; default: {default_port}",
    )
    parser.add_argument(
        "--http-port",
        type=int,
        metavar="PORT",
        help="of the OpenAI API over HTTP; 0: a free one; default: the one after --port",
    )
    parser.add_argument("--redis", default="", metavar="URL", help="default: one of our own")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PART.KEY=VALUE",
        help="a setting of store, router, prefill, decode, worker (both), draft or autoscaler; "
        "repeatable",
    )
    parser.add_argument(
        "--tls",
        action="store_true",
        help="TLS to clients and between parts, with certificates of its own whose role decides "
        "who may call what; /metrics stays plain HTTP",
    )
    parser.add_argument(
        "--api-keys",
        action="store_true",
        help="serve only who has an API key; `baton api-key add` makes more",
    )
    parser.add_argument(
        "--metrics",
        action="store_true",
        help="serve /metrics at each part, on a port of loopback and over plain HTTP, and write a "
        "Prometheus configuration that finds them",
    )
    parser.add_argument(
        "--trace-to",
        default="",
        metavar="HOST:PORT",
        help="send a trace of each request to an OpenTelemetry collector (OTLP over gRPC)",
    )
    parser.add_argument(
        "--trace-ratio",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="of the requests that are traced, 0 to 1; default: 1",
    )
    parser.add_argument(
        "--autoscale",
        action="store_true",
        help="start and stop workers as load comes and goes; --prefill and --decode are those it "
        "begins with",
    )
    for role in ("prefill", "decode"):
        least, most = (getattr(defaults, f"num_{role}_{bound}") for bound in ("min", "max"))
        parser.add_argument(
            f"--min-{role}",
            type=int,
            metavar="N",
            help=f"with --autoscale, fewest {role} workers; 0 for both roles: none when nobody "
            f"asks; default: {least}",
        )
        parser.add_argument(
            f"--max-{role}",
            type=int,
            metavar="N",
            help=f"with --autoscale, most {role} workers; default: {most}",
        )
    parser.add_argument(
        "--log-dir", default="", metavar="FOLDER", help="keep the logs of all processes there"
    )


def cluster_of(parsed: argparse.Namespace) -> ClusterConfig:
    """Those options as a value. Raises: ClusterError naming the wrong one."""
    bounds = _bounds_of(parsed)
    return ClusterConfig(
        model=parsed.model,
        more_models=parsed.more_models,
        num_prefill=parsed.prefill,
        num_decode=parsed.decode,
        num_draft=parsed.draft,
        draft_model=parsed.draft_model,
        num_stores=parsed.stores,
        transport=parsed.transport,
        handover=parsed.handover,
        direct_transport=parsed.direct_transport,
        device=parsed.device,
        port=parsed.port,
        http_port=parsed.http_port,
        redis_url=parsed.redis,
        overrides=tuple(parsed.set),
        metrics=parsed.metrics,
        trace_to=parsed.trace_to,
        trace_ratio=parsed.trace_ratio,
        autoscale=parsed.autoscale,
        **bounds,
        tls=parsed.tls,
        api_keys=parsed.api_keys,
        log_dir=parsed.log_dir,
    )


def _bounds_of(parsed: argparse.Namespace) -> dict[str, Any]:
    """Of the workers, with --autoscale, as far as they are given. Raises: ClusterError."""
    given = {
        (bound, role): getattr(parsed, f"{bound}_{role}")
        for bound in ("min", "max")
        for role in ("prefill", "decode")
    }
    bounds = {}
    for (bound, role), value in given.items():
        if value is None:
            continue
        if not parsed.autoscale:
            raise ClusterError(
                f"--{bound}-{role} {value}: goes with --autoscale; without it there are as many as "
                f"--{role} says"
            )
        bounds[f"num_{role}_{bound}"] = value
    return bounds


class _Models(argparse.Action):
    """The first `--model` is the model, the others are more of them."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        is_first = not getattr(namespace, "has_model", False)
        namespace.has_model = True
        if is_first:
            namespace.model = values
        else:
            namespace.more_models = (*namespace.more_models, values)


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    return int(token_id), float(bias)


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def seconds(text: str) -> float:
    """A time of the command line: above 0. Raises: ArgumentTypeError."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError("must be more than 0")
    return value
