"""The `baton` command, a click group: what users type and see. The library imports nothing of it.

Each command is a function in one of these modules, which is imported when the command is called;
`baton --help` imports none. A command returns its exit code, or None for 0.

Exit codes: 0 done, 1 failed, 2 wrong arguments, 130 ended by Ctrl-C. An error is one line on
standard error that names what is wrong and how to fix it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem

from baton.errors import BatonError
from process.settings import SettingsError

_COMMANDS = {
    "up": ("up", "Start a cluster on this machine."),
    "generate": ("generate", "Complete a prompt."),
    "chat": ("generate", "Hold a conversation."),
    "status": ("status", "Show the cluster."),
    "autoscale": ("explain", "Show what the autoscaler decided and why."),
    "explain": ("explain", "Show why a request went to its workers."),
    "top": ("status", "Watch the cluster in the terminal."),
    "audit": ("blocks", "Compare the prefix index with the stores."),
    "block": ("blocks", "Show what happened to a KV block."),
    "models": ("models", "List the served model types, or check one checkpoint."),
    "demo": ("up", "Start a cluster, send a prompt twice, and check where the KV came from."),
    "replay": ("generate", "Run a recorded request again, and compare its tokens."),
    "bench": ("bench", "Measure a cluster, or the engine alone."),
    "adapter": ("adapters", "Load, unload or list LoRA adapters."),
    "keys": ("keys", "Make or rotate the keys that sign handles."),
    "api-key": ("keys", "Make, list or remove the API keys of clients."),
    "certs": ("keys", "Make certificates for development."),
    "preflight": ("preflight", "Show what a Kubernetes cluster lacks for Baton."),
}
"""By command, its module and its line in the list of commands."""


class CommandGroup(click.Group):
    """The commands of `_COMMANDS`. Listing and completing their names imports no module."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"baton.cli.{_COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = (name for name in _COMMANDS if name.startswith(incomplete))
        items = [CompletionItem(name, help=_COMMANDS[name][1]) for name in names]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]


commands = CommandGroup(
    "baton",
    help="Serve language models with prefill and decode on separate workers. Each answer says "
    "where its KV cache came from.",
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of these arguments, by default the process's own. Returns: the exit code."""
    try:
        code: int | None = commands.main(arguments, "baton", standalone_mode=False)
        sys.stdout.flush()
        return code or 0
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "baton"
        what = error.format_message().rstrip(".")
        sys.stderr.write(f"{command}: {what}; see `{command} --help`\n")
        return 2
    except BrokenPipeError:
        # The reader of the output has ended, as in `| head`: end silently, at exit, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (BatonError, SettingsError, OSError) as error:
        # An OSError names a file or folder of the user that cannot be used.
        sys.stderr.write(f"baton: {error}\n")
        return 1
    except click.Abort as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            return 130
        raise
