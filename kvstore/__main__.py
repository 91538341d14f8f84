"""`python -m kvstore --config store.toml --set key=value`: one KV store until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import sys

from kvstore import serve
from kvstore.config import KvStoreSettings
from process import entry, logs

logger = logging.getLogger("kvstore")


async def main(settings: KvStoreSettings, stop: asyncio.Event) -> None:
    """Serve; the `ready` line names the address."""
    async with serve.running(settings) as store:
        logs.event(
            logger,
            "ready",
            address=store.address,
            node_id=store.node.node_id,
            incarnation=store.node.incarnation.hex(),
        )
        await stop.wait()
        logs.event(logger, "stopping")


if __name__ == "__main__":
    sys.exit(entry.run("kvstore", KvStoreSettings, main))
