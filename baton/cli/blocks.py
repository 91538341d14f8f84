"""`baton audit` and `baton block`: the prefix index compared with the stores, and what happened to
KV blocks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.text import Text

from baton import index_audit
from baton.cli import options, render
from baton.cli.options import RouterTarget, seconds, value
from baton.cli.render import Column, number, text
from baton.cluster.running_clusters import ClusterState
from baton.errors import InvalidArgument, NotFound, Unavailable
from baton.index_audit import StoreAudit, StoreHistory
from kvstore.block_hash import CHAIN_HASH_BYTES
from process.registry import RedisAccess
from protos import common_pb2, kvstore_pb2


@dataclass(frozen=True)
class RedisTarget(RouterTarget):
    """The Redis of a cluster, with its TLS files and password."""

    redis: str = ""
    """URL of the Redis; empty: that of a cluster that this user started."""
    redis_ca_file: str = ""
    redis_cert_file: str = ""
    redis_key_file: str = ""
    redis_password_file: str = ""
    redis_user: str = ""

    @functools.cached_property
    def state(self) -> ClusterState | None:
        """The cluster of this user whose Redis it is; None where --redis names the Redis of another
        cluster."""
        return None if self.redis else super().state

    def redis_url(self) -> str:
        """The URL of the Redis. Raises: Unavailable where none is named and no cluster of this user
        runs."""
        if self.redis:
            return self.redis
        if self.state is not None and self.state.redis_url:
            return self.state.redis_url
        if self.address:
            raise Unavailable(
                f"no cluster of yours runs at {self.address}; give --redis URL instead"
            )
        raise Unavailable(
            "no cluster of yours runs here; start one with `baton up`, or give --redis URL"
        )

    def access(self) -> RedisAccess:
        """The TLS files and password of the Redis. Raises: SettingsError."""
        return RedisAccess(
            ca_file=self.redis_ca_file,
            cert_file=self.redis_cert_file,
            key_file=self.redis_key_file,
            user=self.redis_user,
            password_file=self.redis_password_file,
        )


redis_target = options.as_argument(
    "target",
    RedisTarget,
    options.address_option("Use the Redis of your cluster whose router is at this address."),
    options.cluster_name,
    value(
        "--redis",
        "URL",
        "Use the Redis at this URL.",
        "",
        one_of="where",
    ),
    options.section(
        "TLS and password of that Redis",
        value("--redis-ca-file", "FILE", "Use TLS (rediss://) and trust these CAs.", ""),
        value("--redis-cert-file", "FILE", "Authenticate with this certificate.", ""),
        value("--redis-key-file", "FILE", "The private key of that certificate.", ""),
        value("--redis-password-file", "FILE", "Send the password in this file.", ""),
        value(
            "--redis-user",
            "NAME",
            "The user of that password. By default it is Redis's default user.",
            "",
        ),
    ),
    options.trust_options(),
)


@options.command("audit")
@redis_target
@value(
    "--settle",
    "SECONDS",
    "Wait at most this long for changes that a store has not written to Redis yet.",
    5.0,
    type=seconds,
)
@value(
    "--timeout",
    "SECONDS",
    "Give up on a store when reading it and its index takes longer.",
    60.0,
    type=seconds,
)
@options.as_json()
def audit(target: RedisTarget, settle: float, timeout: float, as_json: bool) -> int:
    """Compare the prefix index in Redis with the blocks that each store holds.

    Exit code 1: an index has drifted, which means that it lacks entries or has false ones, not
    counting changes in flight; or a store that has a heartbeat could not be compared.
    """
    audits = asyncio.run(
        index_audit.audit(
            target.redis_url(),
            settle_s=settle,
            timeout_s=timeout,
            dial=target.dialer(),
            access=target.access(),
        )
    )
    if as_json:
        render.print_json(_audits_as_json(audits))
    elif audits:
        render.show(render.table(_AUDIT, audits))
    else:
        render.show(Text("no store is registered in that Redis"))
    return 1 if index_audit.found_fault(audits) else 0


def _audits_as_json(audits: Sequence[StoreAudit]) -> dict[str, Any]:
    stores = [
        {
            **dataclasses.asdict(one),
            "precision": one.precision,
            "recall": one.recall,
            "state": _state_of(one),
        }
        for one in audits
    ]
    return {"found_fault": index_audit.found_fault(audits), "stores": stores}


def _state_of(one: StoreAudit) -> str:
    """The state in a word or a sentence."""
    if one.problem:
        return one.problem
    if one.has_drifted:
        return "DRIFTED"
    num_earlier = one.num_earlier_indexes
    earlier = f"; {num_earlier} indexes of earlier starts in Redis" if num_earlier else ""
    return ("ok" if one.is_settled else "not settled in time: not known") + earlier


def _compared(title: str, name: str, shown: Callable[[Any], str] = str) -> Column:
    """A number, shown where the store could be compared."""
    return number(title, lambda one: "-" if one.problem else shown(getattr(one, name)))


def _share(part: float) -> str:
    return f"{100 * part:.2f} %"


def _staleness(one: StoreAudit) -> str:
    if one.problem or one.staleness_s is None:
        return "-"
    return render.format_seconds(one.staleness_s)


_AUDIT = (
    text("index of", "node_id"),
    _compared("in the store", "num_present"),
    _compared("in the index", "num_indexed"),
    _compared("precision", "precision", _share),
    _compared("recall", "recall", _share),
    _compared("missing", "num_missing"),
    _compared("false", "num_false"),
    _compared("in flight", "num_in_flight"),
    _compared("lag", "sequence_lag"),
    number("behind for", _staleness),
    text("state", _state_of),
)


# -- block


@options.command("block")
@click.argument("chain_hash", metavar="[HASH]", default="")
@value("--num", "N", "Show at most N blocks of each store.", 8)
@redis_target
@value(
    "--timeout",
    "SECONDS",
    "Give up on a store that does not answer within this time.",
    5.0,
    type=seconds,
)
@options.as_json()
def block(chain_hash: str, num: int, target: RedisTarget, timeout: float, as_json: bool) -> None:
    """Show what happened to a KV block at each store: written, pulled, verified, demoted, evicted;
    with the worker and the trace of the request.

    HASH is the chain hash of the block, or its first digits, as in traces and logs. By default the
    blocks with the latest events are shown.
    """
    histories = asyncio.run(
        index_audit.block_histories(
            target.redis_url(),
            _prefix_of(chain_hash),
            max_blocks=max(1, num),
            timeout_s=timeout,
            dial=target.dialer(),
            access=target.access(),
        )
    )
    if histories and all(each.problem for each in histories):
        raise Unavailable("; ".join(f"{each.node_id}: {each.problem}" for each in histories))
    if not any(each.blocks for each in histories):
        named = f"block {chain_hash}" if chain_hash else "any block"
        raise NotFound(f"no store remembers {named}")
    if as_json:
        render.print_json(_histories_as_json(histories))
    else:
        render.show(_histories(histories))


def _prefix_of(digits: str) -> bytes:
    """The first bytes of a chain hash, from hex digits. Raises: InvalidArgument."""
    try:
        prefix = bytes.fromhex(digits)
    except ValueError as error:
        raise InvalidArgument(
            "HASH", f"{digits[:80]!r} is not hexadecimal, two digits a byte"
        ) from error
    if len(prefix) > CHAIN_HASH_BYTES:
        raise InvalidArgument("HASH", f"a chain hash has {2 * CHAIN_HASH_BYTES} digits")
    return prefix


def _histories_as_json(histories: Sequence[StoreHistory]) -> dict[str, Any]:
    """The histories as JSON values; hashes are hex."""
    return {
        "stores": [
            {
                "node_id": each.node_id,
                "problem": each.problem,
                "blocks": [_plain(block) for block in each.blocks],
            }
            for each in histories
        ]
    }


def _histories(histories: Sequence[StoreHistory]) -> RenderableType:
    """A table for each block of each store. Pure."""
    parts: list[RenderableType] = []
    for each in histories:
        if each.problem:
            parts.append(Text(f"{each.node_id}: {each.problem}", style="red"))
        for block in each.blocks:
            parts += [Text(), _heading(each.node_id, block), _events(block)]
    return Group(*parts[isinstance(parts[0], Text) and not parts[0] :])


def _heading(node_id: str, block: kvstore_pb2.BlockHistory) -> Text:
    where = ", ".join(_tier(tier) for tier in block.tiers) or "no longer there"
    text = Text(f"{block.chain_hash.hex()}", style="bold")
    text.append(f" at {node_id}: {where}", style="not bold")
    if block.tiers:
        text.append(f", {block.num_hits} hits, {block.num_pins} pins", style="not bold")
        after = block.parent.hex() if block.parent else "the beginning of a prompt"
        text.append(f", after {after}", style="not bold")
    return text


def _events(block: kvstore_pb2.BlockHistory) -> RenderableType:
    made = render.table([text(title, str) for title in ("when", "what", "by", "trace")], ())
    if block.num_events_forgotten:
        made.add_row("", f"({block.num_events_forgotten} earlier)", "", "")
    for event in block.events:
        when = datetime.datetime.fromtimestamp(event.unix_us / 1e6)
        made.add_row(
            when.isoformat(sep=" ", timespec="milliseconds"),
            event.what.replace("_", " "),
            event.worker_id or "the store",
            event.trace_id or "-",
        )
    return made


def _tier(number: int) -> str:
    return common_pb2.Tier.Name(number).removeprefix("TIER_").lower()


def _plain(block: kvstore_pb2.BlockHistory) -> dict[str, Any]:
    plain = render.to_dict(block)
    plain["chain_hash"], plain["parent"] = block.chain_hash.hex(), block.parent.hex()
    plain["tiers"] = [_tier(tier) for tier in block.tiers]
    for event, message in zip(plain["events"], block.events, strict=True):
        event["unix_us"] = message.unix_us
    return plain
