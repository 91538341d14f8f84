"""`baton demo`: start a cluster, ask it the same twice, show where the KV came from, stop.

The second time the prompt's full blocks are there already. The demo fails if the answers differ, or
if decode computed a single prompt token itself: that is the promise.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from baton import command_generate, command_options, command_up
from baton.errors import ClusterError
from baton.messages import Completion

_PROMPT = (
    "Once upon a time there was a little fox named Ruby who lived at the edge of a quiet forest. "
    "One morning she found a small silver key under the old oak tree."
)


def add_parser(commands: Any) -> None:
    """`baton demo` and its options."""
    parser = commands.add_parser(
        "demo", help="a cluster, an answer, the proof", description=__doc__
    )
    parser.add_argument("--prompt", default=_PROMPT)
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N")
    command_options.add_cluster(parser, default_port=0)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Returns: 0. Raises: ClusterError when the cluster or the proof fails."""
    config = command_options.cluster_of(parsed)
    num_processes = config.num_workers + config.num_all_stores + 2
    with command_up.running(config) as cluster, cluster.connect() as client:
        names = ", ".join(cluster.processes)
        sys.stdout.write(f"{num_processes} processes: {names}\n\n> {parsed.prompt}\n\n")
        answers = []
        for title in ("", "The same again, its prefix cached:\n\n"):
            sys.stdout.write(title)
            chunks = client.generate(
                parsed.prompt,
                model=config.model if config.more_models else "",
                max_tokens=parsed.max_tokens,
                temperature=0.0,
            )
            answers.append(command_generate.show(chunks))
            sys.stdout.write("\n")
        _check(answers)
        sys.stdout.write("Both answers are equal, and decode computed no prompt token.\n")
    return 0


def _check(answers: list[Completion]) -> None:
    if answers[0].token_ids != answers[1].token_ids:
        raise ClusterError("the answers differ; this is a bug, please report it")
    for answer in answers:
        for leg in answer.provenance.legs:
            if leg.role == "decode" and leg.num_tokens_computed:
                raise ClusterError(
                    f"{leg.worker_id} computed {leg.num_tokens_computed} prompt tokens itself "
                    f"(reasons: {dict(leg.recomputed) or 'not told'}); --log-dir keeps "
                    "the logs that say more"
                )
