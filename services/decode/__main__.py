"""Command `python -m services.decode --config file.toml --set key=value`: one decode worker
process."""

from __future__ import annotations

import asyncio
import sys

from process import entrypoint
from services.worker.config import WorkerSettings

_IMPORTS = ("services.decode.role", "services.worker.main")
"""Modules of this role that import torch, for `entrypoint.run` to import."""


async def _main(settings: WorkerSettings, stop: asyncio.Event) -> None:
    from services.decode.role import DecodeRole
    from services.worker import main

    await main.run(settings, stop, "decode", DecodeRole)


if __name__ == "__main__":
    sys.exit(entrypoint.run("decode", WorkerSettings, _main, imports=_IMPORTS))
