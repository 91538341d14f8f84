"""A prefill or decode worker whose device takes a set time for a step
(engine/testing/paced_model.py), so that on few cores more workers serve more. Everything else is a
normal worker.

    python -m services.worker.testing.paced_worker ROLE STEP_S TOKEN_S [ARGUMENTS OF services.ROLE]
"""

from __future__ import annotations

import asyncio
import functools
import sys
from typing import Any

from engine.models import loader
from engine.testing.paced_model import DevicePace, PacedModel
from process import entrypoint
from services.decode.role import DecodeRole
from services.prefill.role import PrefillRole
from services.worker import main as worker_main
from services.worker.config import WorkerSettings

_ROLES: dict[str, Any] = {"prefill": PrefillRole, "decode": DecodeRole}


def pace_models(pace: DevicePace) -> None:
    """Give the models that engines of this process load from now on a fixed time per step."""
    module: Any = loader
    load_model = module.load_model

    @functools.wraps(load_model)
    def load_paced(*args: Any, **more: Any) -> PacedModel:
        return PacedModel(load_model(*args, **more), pace)

    module.load_model = load_paced


def main(role: str, step_s: str, token_s: str, *arguments: str) -> int:
    """Run one paced worker from start to end. Returns: the exit code."""
    pace_models(DevicePace(float(step_s), float(token_s)))

    async def serve(settings: WorkerSettings, stop: asyncio.Event) -> None:
        await worker_main.run(settings, stop, role, _ROLES[role])

    return entrypoint.run(role, WorkerSettings, serve, arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
