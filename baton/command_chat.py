"""`baton chat`: a conversation; /new forgets it, /quit or Ctrl-D ends it.

Lines may also be piped in, one for each turn. Ctrl-C ends the answer under way, or the chat when
there is none.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from baton import command_generate, command_options
from baton.client import SyncClient
from baton.errors import BatonError
from baton.provenance_view import short_line


def add_parser(commands: Any) -> None:
    """`baton chat` and its options."""
    parser = commands.add_parser("chat", help="hold a conversation", description=__doc__)
    parser.add_argument("--system", default="", metavar="TEXT", help="what the model is told first")
    command_options.add_sampling(parser)
    command_options.add_address(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Returns: 0, or 1 when a piped turn failed. Raises: what the client raises at its start."""
    start = [{"role": "system", "content": parsed.system}] if parsed.system else []
    history = list(start)
    interactive = sys.stdin.isatty()
    with command_options.client_of(parsed) as client:
        client.models()  # say at once, not after the first question, that nobody answers
        while (line := _read(interactive)) is not None:
            if line == "/quit":
                break
            if line == "/new":
                history = list(start)
            elif line:
                try:
                    _turn(client, history, line, parsed)
                except BatonError as error:
                    if not interactive:
                        raise
                    sys.stderr.write(f"baton: {error}\n")
    return 0


def _turn(
    client: SyncClient, history: list[dict[str, str]], line: str, parsed: argparse.Namespace
) -> None:
    """Ask, show, and remember both sides; a turn that failed or was ended leaves no trace."""
    asked = [*history, {"role": "user", "content": line}]
    try:
        chunks = client.generate(asked, **command_options.sampling_of(parsed))
        completion = command_generate.stream(chunks)
    except KeyboardInterrupt:
        sys.stderr.write("(ended)\n")
        return
    sys.stdout.write(short_line(completion) + "\n")
    sys.stdout.flush()
    history[:] = [*asked, {"role": "assistant", "content": completion.text}]


def _read(interactive: bool) -> str | None:
    """The next line without its end; None when there are no more."""
    if interactive:
        try:
            return input("> ").strip()
        except EOFError:
            sys.stdout.write("\n")
            return None
    line = sys.stdin.readline()
    return line.strip() if line else None
