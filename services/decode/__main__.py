"""`python -m services.decode --config file.toml --set key=value`: one decode worker process."""

from __future__ import annotations

import asyncio
import sys

from process import entry
from services.decode.role import DecodeRole
from services.worker import main
from services.worker.config import WorkerSettings


async def _main(settings: WorkerSettings, stop: asyncio.Event) -> None:
    await main.run(settings, stop, "decode", DecodeRole)


if __name__ == "__main__":
    sys.exit(entry.run("decode", WorkerSettings, _main))
