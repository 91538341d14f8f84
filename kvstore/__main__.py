"""`python -m kvstore --config store.toml --set key=value`: one KV store until SIGTERM or SIGINT,
and then until the last lease on its blocks ends, at most `drain_s`.
"""

from __future__ import annotations

import asyncio
import logging
import sys

from process import entrypoint, logs  # before gRPC: see process.entrypoint

# isort: split
from kvstore import store_process
from kvstore.config import KvStoreSettings
from process.deadline import Deadline

logger = logging.getLogger("kvstore")


async def main(settings: KvStoreSettings, stop: asyncio.Event) -> None:
    """Run one KV store process until `stop` is set. The log line `ready` names its address."""
    async with store_process.running(settings) as store:
        entrypoint.begin_serving()
        logs.event(
            logger,
            "ready",
            address=store.address,
            node_id=store.node.node_id,
            incarnation=store.node.incarnation.hex(),
            metrics=store.metrics_address,
        )
        await stop.wait()
        logs.event(logger, "draining")
        if not await store.node.drain(Deadline.after(settings.drain_s)):
            logs.event(logger, "drain_cut_short", level=logging.WARNING)
        logs.event(logger, "stopping")


if __name__ == "__main__":
    sys.exit(entrypoint.run("kvstore", KvStoreSettings, main))
