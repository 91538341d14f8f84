"""`baton replay FILE`: run a recorded request again and prove that the same tokens come.

Exit code 0 and one line when every token is equal; 1 with the first place where the runs part, and
how both came to their token there. It runs on the cluster at --address, or on the one that this
user started last; with --start on one that is started for it and stopped behind it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baton import command_options, command_up, record
from baton.client import SyncClient
from baton.errors import FailedPrecondition, Unavailable
from baton.messages import Completion, completions_from
from baton.record import Difference, Record
from checkpoints.resolve import bundled_names
from protos import inference_pb2


def add_parser(commands: Any) -> None:
    """`baton replay` and its options."""
    parser = commands.add_parser(
        "replay", help="run a record again, prove equal tokens", description=__doc__
    )
    parser.add_argument("file", type=Path, help="what `baton generate --record` wrote")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="the router's; default: the cluster that `baton up` started last",
    )
    command_options.add_cluster_name(where)
    where.add_argument(
        "--start",
        action="store_true",
        help="start a cluster for it, by the options below, and stop it behind it",
    )
    command_options.add_cluster(parser, default_port=0)
    command_options.add_credentials(parser, has_tls=True)
    parser.set_defaults(run=run, model="")


def run(parsed: argparse.Namespace) -> int:
    """Returns: 0 when all tokens are equal, 1 when not. Raises: FailedPrecondition for a cluster of
    another model; what the client raises."""
    recorded = record.read(parsed.file)
    with _router(parsed, recorded) as client:
        _check_model(recorded, client.models())
        completions = completions_from(client.send(record.request_of(recorded)))
    found = record.difference(recorded, completions)
    sys.stdout.write(_equal(completions) if found is None else _unequal(found))
    return 0 if found is None else 1


@contextlib.contextmanager
def _router(parsed: argparse.Namespace, recorded: Record) -> Iterator[SyncClient]:
    if not parsed.start:
        if not parsed.address and command_options.state_of(parsed) is None:
            raise Unavailable(
                "no cluster of yours runs here; --start starts one for it, --address names another"
            )
        with command_options.client_of(parsed) as client:
            yield client
        return
    parsed.model = parsed.model or _own_model(recorded)
    with (
        command_up.running(command_options.cluster_of(parsed)) as cluster,
        cluster.connect() as client,
    ):
        yield client


def _own_model(recorded: Record) -> str:
    """The record's model, if it comes with Baton: a record may be anybody's, and is not to choose
    what is fetched and run. Raises: FailedPrecondition."""
    if recorded.model not in bundled_names():
        raise FailedPrecondition(
            f"the record is of model {recorded.model!r}, which does not come with Baton; say "
            "--model with its name or folder, or --address of a cluster that serves it"
        )
    return recorded.model


def _check_model(recorded: Record, served: list[inference_pb2.ModelInfo]) -> None:
    fingerprints = {model.model_fingerprint for model in served}
    if recorded.model_fingerprint not in fingerprints:
        there = ", ".join(f"{model.model} ({model.model_fingerprint[:16]})" for model in served)
        raise FailedPrecondition(
            f"the record is of model {recorded.model}, fingerprint "
            f"{recorded.model_fingerprint[:16]}; this cluster serves {there or 'nothing'}: tokens "
            "of another model, dtype or KV layout prove nothing; --address names another cluster, "
            "--start starts one"
        )


def _equal(completions: list[Completion]) -> str:
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    return (
        f"replayed: {num_tokens} tokens in {len(completions)} samples, all equal "
        f"(seed {completions[0].seed})\n"
    )


def _unequal(found: Difference) -> str:
    lines = [found.what]
    for name, trace in (("recorded", found.recorded), ("replayed", found.replayed)):
        if trace is not None:
            lines.append(f"  {name}: {json.dumps(trace, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"
