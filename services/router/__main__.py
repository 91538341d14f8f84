"""Entry point of a router process: `python -m services.router --config router.toml --set
model=<name>` runs one router until SIGTERM or SIGINT.
"""

from __future__ import annotations

import asyncio
import logging
import sys

from process import entrypoint, logs
from services.router.app import Router, load_model
from services.router.config import RouterSettings

logger = logging.getLogger("router")


async def main(settings: RouterSettings, stop: asyncio.Event) -> None:
    """Load the models, then serve until `stop` is set."""
    # Loading reads files and may download them: not on the loop, which handles signals.
    models = [
        await asyncio.to_thread(load_model, model) for model in (settings.model, *settings.models)
    ]
    router = Router(settings, *models)
    try:
        await router.start()
        entrypoint.begin_serving()
        logs.event(
            logger,
            "ready",
            address=router.address,
            router_id=router.router_id,
            http=router.http_address,
            metrics=router.metrics_address,
        )
        await stop.wait()
    finally:
        await router.stop()


if __name__ == "__main__":
    sys.exit(entrypoint.run("router", RouterSettings, main))
