"""Options that several commands share, as decorators. `sampling`, for example, adds the sampling
options to a command, which gets their values as its argument `sampling`.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from baton.client import Credentials, SyncClient
from baton.cluster import running_clusters as cluster_state
from baton.cluster.running_clusters import ClusterState
from baton.errors import InvalidArgument, Unavailable
from process import secret_files
from process.authorization import PeerRole
from process.rpc import Dialer
from process.tls import TlsSettings

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

FILE = click.Path(path_type=Path)
_MAX_KEY_BYTES = 4096


class SectionOption(click.Option):
    """An option that the help shows in its `section`. Options of a command with the same `one_of`
    exclude one another."""

    def __init__(self, *args: Any, one_of: str = "", **attributes: Any) -> None:
        if attributes.get("multiple"):
            attributes["help"] += " May be given several times."
        super().__init__(*args, **attributes)
        self.one_of = one_of
        self.section = "Options"

    def get_help_extra(self, ctx: click.Context) -> Any:
        """The extra items of an option's help as click has them, without an empty default."""
        extra = super().get_help_extra(ctx)
        if self.default in ("", ()):
            extra.pop("default", None)
        return extra


class SectionCommand(click.Command):
    """A click command whose options are `SectionOption`s."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(param, "section", "Options"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        given: dict[str, SectionOption] = {}
        for option in self.params:
            if not (isinstance(option, SectionOption) and option.one_of):
                continue
            if ctx.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE:
                first = given.setdefault(option.one_of, option)
                if first is not option and not ctx.resilient_parsing:
                    raise click.UsageError(
                        f"{first.opts[0]} and {option.opts[0]} exclude each other: give one.", ctx
                    )
        return rest


class SectionGroup(click.Group):
    """A click group whose commands are `SectionCommand`s."""

    command_class = SectionCommand


def command(name: str) -> Callable[[Callable[..., Any]], click.Command]:
    return click.command(name, cls=SectionCommand)


def group(name: str) -> Callable[[Callable[..., Any]], click.Group]:
    return click.group(name, cls=SectionGroup, no_args_is_help=False)


def value(
    name: str,
    metavar: str | None,
    help: str,
    default: Any = None,
    *,
    short: str = "",
    dest: str = "",
    **more: Any,
) -> Decorator:
    """Make an option with a value. Its type is `type`, or else that of the default.

    Args: metavar: the name of the value in the help; None: that of its type. short: a second name
        of the option, such as -n. dest: the name of the command's argument; by default that of the
        option. more: `one_of`, and further arguments of a click option.
    """
    names = filter(None, (short, name, dest))
    return click.option(
        *names, cls=SectionOption, metavar=metavar, help=help, default=default, **more
    )


def flag(name: str, help: str, *, dest: str = "", **more: Any) -> Decorator:
    """Make an option without a value; arguments as `value`."""
    return value(name, None, help, False, dest=dest, is_flag=True, **more)


def seconds(text: str) -> float:
    """Check that the value of an option is a positive time in seconds. Raises: BadParameter."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise click.BadParameter(f"{text!r} is not a number of seconds above 0.")
    return value


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not TOKEN=BIAS, such as 17=-5.") from None


def section(title: str, *options: Decorator) -> Decorator:
    """Show these options of a command in a section of their own of the help."""

    def decorate(callback: Callable[..., Any]) -> Callable[..., Any]:
        for param in _add(callback, options):
            param.section = title
        return callback

    return decorate


def as_argument(name: str, make: Callable[..., Any], *options: Decorator) -> Decorator:
    """Add `options` to a command, which gets `make(their values)` as its argument `name`. What
    `make` raises is raised when the command runs."""

    def decorate(callback: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(callback)
        def run(**values: Any) -> Any:
            own = {key: values.pop(key) for key in names}
            return callback(**values, **{name: make(**own)})

        names = [param.name or "" for param in _add(run, options)]
        return run

    return decorate


def _add(callback: Callable[..., Any], options: Sequence[Decorator]) -> list[SectionOption]:
    """Add options to a function; click keeps these in an attribute. Returns: the added options."""
    num_others = len(callback.__dict__.get("__click_params__", ()))
    for add in reversed(options):
        add(callback)
    added: list[SectionOption] = callback.__dict__["__click_params__"][num_others:]
    return added


# -- which cluster, TLS and API keys


@dataclass(frozen=True)
class RouterTarget:
    """The router that a command calls, and its TLS files and API key."""

    address: str = ""
    """Address of the router, host:port; empty: the router of a cluster that this user started."""
    cluster: str = ""
    """Name of a cluster that this user started; empty: the last one."""
    tls: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    api_key_file: Path | None = None

    @functools.cached_property
    def state(self) -> ClusterState | None:
        """The cluster that these options choose, if this user started it here; None: another one.
        Where several run and none is named, a line on standard error says which one is taken.

        Raises: Unavailable where no cluster has the name.
        """
        if self.address:
            return cluster_state.find(self.address)
        running = cluster_state.running()
        if self.cluster:
            for state in reversed(running):
                if state.name == self.cluster:
                    return state
            names = ", ".join(state.name for state in running) or "none"
            raise Unavailable(
                f"--cluster {self.cluster}: no cluster of yours has this name; running: {names}"
            )
        if len(running) > 1:
            *others, taken = (state.name for state in running)
            sys.stderr.write(
                f"using cluster {taken}, the last one started; --cluster NAME chooses another: "
                f"{', '.join(others)}\n"
            )
        return running[-1] if running else None

    def router_address(self) -> str:
        """The address of the router, host:port. Raises: Unavailable where no cluster is named and
        none runs; InvalidArgument where the address is the HTTP port of a cluster that this user
        started."""
        if not self.address:
            if self.state is None:
                raise Unavailable(
                    "no cluster of yours runs here; start one with `baton up`, or give --address"
                )
            return self.state.address
        if self.state is not None and _port(self.address) == _port(self.state.http_address):
            raise InvalidArgument(
                "--address", f"{self.address} is the HTTP port; gRPC is at {self.state.address}"
            )
        return self.address

    def credentials(self) -> Credentials:
        """The credentials of the options, or those of the cluster that this user started.

        Raises: SettingsError, InvalidArgument for files that cannot be used.
        """
        api_key = os.environ.get("BATON_API_KEY", "") or (self.state.api_key if self.state else "")
        if self.api_key_file is not None:
            content = secret_files.read_secret(
                self.api_key_file,
                what="--api-key-file",
                max_bytes=_MAX_KEY_BYTES,
                fix="write your API key into it",
            )
            api_key = content.decode(errors="replace").strip()
        if not (api_key.isascii() and api_key.isprintable()):
            raise InvalidArgument("--api-key-file", "holds no API key")
        tls: TlsSettings | None = None
        if self.tls or self.ca_file or self.cert_file:
            tls = TlsSettings(self.ca_file, self.cert_file, self.key_file)
        elif self.state is not None and self.state.tls_dir:
            # Here, since cryptography takes a while to import.
            from baton.development_certificates import CertSet

            tls = CertSet(Path(self.state.tls_dir)).tls_of(PeerRole.ADMIN)
        return Credentials(tls, api_key)

    def client(self) -> SyncClient:
        """Make a client of the router. Raises: Unavailable, SettingsError, InvalidArgument."""
        return SyncClient(self.router_address(), self.credentials())

    def dialer(self) -> Dialer:
        """Make a Dialer of channels to the workers and stores of the cluster, with these
        credentials."""
        return Dialer(self.credentials().identity())


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def address_option(help: str) -> Decorator:
    latest = "By default it is the cluster that you started last."
    return value("--address", "HOST:PORT", f"{help} {latest}", "", one_of="where")


cluster_name: Decorator = value(
    "--cluster",
    "NAME",
    "Use this one of the clusters that you started here: its name is that of "
    "`baton up --cluster`, or its router's port.",
    "",
    one_of="where",
)


def router_target(
    address: str = "Call the router at this address.", *, has_tls: bool = True
) -> Decorator:
    """Add the options that choose a router to a command, which gets `target: RouterTarget`.
    has_tls: False where the command has another option --tls."""
    options = (address_option(address), cluster_name, trust_options(has_tls=has_tls))
    return as_argument("target", RouterTarget, *options)


def trust_options(*, has_tls: bool = True) -> Decorator:
    tls = flag("--tls", "Use TLS and trust the CAs of this machine.")
    return section(
        "TLS and API key (not needed for a cluster that you started here)",
        *((tls,) if has_tls else ()),
        value("--ca-file", "FILE", "Use TLS and trust the CAs in this file.", ""),
        value("--cert-file", "FILE", "Authenticate with this certificate.", ""),
        value("--key-file", "FILE", "The private key of that certificate.", ""),
        value(
            "--api-key-file",
            "FILE",
            "Send the API key in this file. By default it is in the variable BATON_API_KEY.",
            type=FILE,
        ),
    )


def as_json(help: str = "Print one JSON object.") -> Decorator:
    """Add the option --json to a command, which gets `as_json: bool`."""
    return flag("--json", help, dest="as_json")


# -- sampling: an option's `dest` is an argument of `Client.generate`


def _keywords(logit_bias: Sequence[tuple[int, float]] = (), **values: Any) -> dict[str, Any]:
    """The arguments that were given; `Client.generate` has defaults for the others."""
    biases = {"logit_bias": dict(logit_bias)} if logit_bias else {}
    return biases | {key: each for key, each in values.items() if each not in (None, ())}


sampling = as_argument(
    "sampling",
    _keywords,
    section(
        "Sampling (the defaults are the model's)",
        value("--max-tokens", "N", "Generate at most N tokens.", 128),
        value("--temperature", "T", "0 always takes the most likely token.", type=float),
        value(
            "--top-p",
            "P",
            "Sample from the most likely tokens whose probabilities sum to P.",
            type=float,
        ),
        value("--top-k", "K", "Sample from the K most likely tokens.", type=int),
        value(
            "--min-p",
            "P",
            "Leave out tokens less likely than P times the most likely one.",
            type=float,
        ),
        value("--seed", "N", "The same seed gives the same answer.", type=int),
        value("--stop", "TEXT", "End the answer before this text.", multiple=True),
    ),
    value("--model", "NAME", "Ask this model, if the cluster serves several.", ""),
    value("--tenant", "NAME", "Ask as this tenant.", ""),
    value(
        "--timeout",
        "SECONDS",
        "Give up when the whole answer takes longer.",
        120.0,
        dest="timeout_s",
        type=seconds,
    ),
)

shaping = as_argument(
    "shaping",
    _keywords,
    section(
        "Samples",
        value("-n", "N", "Generate N samples of the prompt.", 1),
        value("--num-beams", "N", "Use beam search with N beams instead of sampling.", 1),
        value(
            "--length-penalty",
            "P",
            "Prefer long answers of a beam search if P is above 0.",
            type=float,
        ),
        flag("--early-stopping", "End a beam search when it has N finished answers."),
    ),
    section(
        "Which tokens may be sampled",
        value("--min-tokens", "N", "Generate at least N tokens.", 0),
        value(
            "--presence-penalty", "P", "Subtract P from the logit of each token that occurred.", 0.0
        ),
        value("--frequency-penalty", "P", "Subtract P for each time that the token occurred.", 0.0),
        value(
            "--repetition-penalty", "P", "Divide the logit of each token that occurred by P.", 1.0
        ),
        value("--no-repeat-ngram", "N", "Never repeat N tokens in a row; 0 allows it.", 0),
        value(
            "--logit-bias",
            "TOKEN=BIAS",
            "Add BIAS to the logit of the token with this id.",
            type=_bias,
            multiple=True,
        ),
        value(
            "--allowed-token",
            "TOKEN",
            "Sample only tokens with this id.",
            dest="allowed_token_ids",
            type=int,
            multiple=True,
        ),
        value("--bad-word", "TEXT", "Never generate this text.", dest="bad_words", multiple=True),
        flag("--ignore-eos", "Continue after the end-of-sequence token."),
        flag("--include-stop-text", "Keep the text of --stop in the answer."),
        value("--adapter", "NAME", "Use this LoRA adapter, which must be loaded.", ""),
    ),
    section(
        "Structured output (one of these)",
        value(
            "--json-schema", "JSON", "The answer is JSON that this schema allows.", one_of="output"
        ),
        value("--regex", "PATTERN", "The answer matches this regular expression.", one_of="output"),
        value(
            "--ebnf",
            "GRAMMAR",
            "The answer follows this grammar, in Lark (start: ...) or GBNF (root ::= ...).",
            one_of="output",
        ),
        value(
            "--choice",
            "TEXT",
            "The answer is this text, or another --choice.",
            multiple=True,
            one_of="output",
        ),
    ),
)
