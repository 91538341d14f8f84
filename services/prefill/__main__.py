"""Command `python -m services.prefill --config file.toml --set key=value`: one prefill worker
process."""

from __future__ import annotations

import asyncio
import sys

from process import entrypoint
from services.worker.config import WorkerSettings

_IMPORTS = ("services.prefill.role", "services.worker.main")
"""Modules of this role that import torch, for `entrypoint.run` to import."""


async def _main(settings: WorkerSettings, stop: asyncio.Event) -> None:
    from services.prefill.role import PrefillRole
    from services.worker import main

    await main.run(settings, stop, "prefill", PrefillRole)


if __name__ == "__main__":
    sys.exit(entrypoint.run("prefill", WorkerSettings, _main, imports=_IMPORTS))
