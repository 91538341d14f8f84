"""`python -m services.autoscaler --config autoscaler.toml`: one autoscaler until SIGTERM or
SIGINT.
"""

from __future__ import annotations

import asyncio
import logging
import sys

from process import entrypoint, logs
from services.autoscaler import kubernetes_scaler
from services.autoscaler.app import Autoscaler
from services.autoscaler.config import AutoscalerSettings

logger = logging.getLogger("autoscaler")


async def main(settings: AutoscalerSettings, stop: asyncio.Event) -> None:
    """Run one autoscaler until `stop` is set."""
    if settings.scaler == "kubernetes":
        # Importing the client takes seconds: not on the loop, which has to hear signals.
        await asyncio.to_thread(kubernetes_scaler.import_client)
    autoscaler = Autoscaler(settings)
    try:
        await autoscaler.start()
        logs.event(
            logger,
            "ready",
            address=autoscaler.address,
            autoscaler_id=autoscaler.autoscaler_id,
            metrics=autoscaler.metrics_address,
        )
        await stop.wait()
        logs.event(logger, "stopping")
    finally:
        await autoscaler.stop()


if __name__ == "__main__":
    sys.exit(entrypoint.run("autoscaler", AutoscalerSettings, main))
