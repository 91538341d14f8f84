"""Options that several commands share, and what they mean."""

from __future__ import annotations

import argparse
import math
from typing import Any

from baton import cluster_plan, cluster_state
from baton.cluster_plan import ClusterConfig
from baton.errors import Unavailable


def add_address(parser: argparse.ArgumentParser) -> None:
    """`--address`."""
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="the router's; default: the cluster that `baton up` started last",
    )


def address_of(parsed: argparse.Namespace) -> str:
    """The router to speak to. Raises: Unavailable when none is named and none runs."""
    if parsed.address:
        return str(parsed.address)
    state = cluster_state.find()
    if state is None:
        raise Unavailable(
            "no cluster of yours runs here; start one with `baton up`, or give --address"
        )
    return state.address


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
    grammar.add_argument("--ebnf", metavar="GRAMMAR", help="the output is of this grammar")
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
        default=defaults.model,
        help="bundled name, folder with a checkpoint, or Hugging Face name (name@revision); "
        f"default: {defaults.model}",
    )
    parser.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill workers")
    parser.add_argument("--decode", type=int, default=1, metavar="N", help="decode workers")
    parser.add_argument(
        "--stores",
        type=int,
        default=1,
        metavar="N",
        help="KV stores; workers are dealt to them in turn, as if each were a machine; default: 1",
    )
    parser.add_argument(
        "--transport",
        choices=cluster_plan.TRANSPORTS,
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
        choices=cluster_plan.HANDOVERS,
        default=defaults.handover,
        help="how a prompt's KV gets from prefill to decode: through the store, directly out of "
        "the prefill worker's cache, or the cheaper way; default: auto",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=default_port,
        help=f"the router's, on loopback; 0: a free one; default: {default_port}",
    )
    parser.add_argument("--redis", default="", metavar="URL", help="default: one of our own")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PART.KEY=VALUE",
        help="a setting of store, router, prefill, decode or worker (both); repeatable",
    )
    parser.add_argument(
        "--log-dir", default="", metavar="FOLDER", help="keep the logs of all processes there"
    )


def cluster_of(parsed: argparse.Namespace) -> ClusterConfig:
    """Those options as a value. Raises: ClusterError naming the wrong one."""
    return ClusterConfig(
        model=parsed.model,
        num_prefill=parsed.prefill,
        num_decode=parsed.decode,
        num_stores=parsed.stores,
        transport=parsed.transport,
        handover=parsed.handover,
        device=parsed.device,
        port=parsed.port,
        redis_url=parsed.redis,
        overrides=tuple(parsed.set),
        log_dir=parsed.log_dir,
    )


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    return int(token_id), float(bias)


def seconds(text: str) -> float:
    """A time of the command line: above 0. Raises: ArgumentTypeError."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError("must be more than 0")
    return value
