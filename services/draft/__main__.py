"""Entry point of a draft worker process: `python -m services.draft --config file.toml --set
key=value`.
"""

from __future__ import annotations

import asyncio
import sys

from process import entrypoint
from services.draft.config import DraftSettings

_IMPORTS = ("services.draft.main",)
"""Modules that import torch."""


async def _main(settings: DraftSettings, stop: asyncio.Event) -> None:
    from services.draft import main

    await main.run(settings, stop)


if __name__ == "__main__":
    sys.exit(entrypoint.run("draft", DraftSettings, _main, imports=_IMPORTS))
