"""The `baton` command: arguments, exit codes, and one line for every error.

Exit codes: 0 done, 1 it failed (one line on stderr says what and how to fix it), 2 wrong arguments,
130 ended by Ctrl-C. What a command does is in its own `command_*` module.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from baton import (
    command_adapter,
    command_api_key,
    command_audit,
    command_autoscale,
    command_bench,
    command_block,
    command_certs,
    command_chat,
    command_demo,
    command_explain,
    command_generate,
    command_keys,
    command_models,
    command_preflight,
    command_replay,
    command_status,
    command_top,
    command_up,
)
from baton.errors import BatonError
from process.settings import SettingsError

_COMMANDS = (
    command_up,
    command_generate,
    command_chat,
    command_status,
    command_autoscale,
    command_explain,
    command_top,
    command_audit,
    command_block,
    command_models,
    command_demo,
    command_replay,
    command_bench,
    command_adapter,
    command_keys,
    command_api_key,
    command_certs,
    command_preflight,
)


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(
        prog="baton",
        description="Language models served with prefill and decode apart, and the proof of where "
        "each answer's KV cache came from.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in _COMMANDS:
        module.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns: the exit code."""
    parsed = build_parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = parsed.run
    try:
        code = run(parsed)
        sys.stdout.flush()
        return code
    except (BatonError, SettingsError) as error:
        sys.stderr.write(f"baton: {error}\n")
        return 1
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): end in silence, also at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        # A file or folder of the user's that cannot be used; the error names it.
        sys.stderr.write(f"baton: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
