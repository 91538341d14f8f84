"""The NIXL library as it is loaded here, and agents made from it. Any thread; blocks.

Measured with NIXL 1.5.1, UCX 1.23:
- The stock progress thread burns a whole core: its delay is patched when the agent is made. It is
  event-driven, so the delay costs no latency.
- UCX listens on every interface unless told otherwise, and NIXL fails when HOME cannot be read:
  both are settled in the environment before the library is loaded.
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any

PROGRESS_DELAY_US = 10_000
"""0.4 % of a core when idle instead of 98.8 %, at the same latency (measured; 0.06 % at 100 ms).
Also how long an event that was missed can hold a step of a transfer up: once, for no cause that was
found, some hundred steps in a row took long, with 100 ms here."""

_making_agent = threading.Lock()


def make_agent(name: str, net_devices: str) -> Any:
    """Load NIXL and make an agent. net_devices: as UCX_NET_DEVICES, `all` for every one; the first
    agent of a process decides. Raises: ImportError without NIXL, and what NIXL raises."""
    prepare_environment(net_devices)
    api, bindings = _load()
    config_type = bindings.nixlAgentConfig

    class PatientConfig(config_type):  # type: ignore[misc, valid-type]
        def __setattr__(self, key: str, value: Any) -> None:
            super().__setattr__(key, PROGRESS_DELAY_US if key == "pthrDelay" else value)

    with _making_agent:
        bindings.nixlAgentConfig = PatientConfig
        try:
            return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        finally:
            bindings.nixlAgentConfig = config_type


def prepare_environment(net_devices: str) -> None:
    """NIXL and UCX read these when they are loaded; what the operator has set stays."""
    if net_devices != "all":
        os.environ.setdefault("UCX_NET_DEVICES", net_devices)
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    home = os.environ.get("HOME", "")
    if not home or not os.access(home, os.R_OK | os.X_OK):
        os.environ.setdefault("NIXL_CONFIG_FILE", os.devnull)


def _load() -> tuple[Any, Any]:
    """The installed build of NIXL; on a machine without CUDA both work alike. The meta package is
    not used: it imports torch."""
    tried: list[str] = []
    for package in ("nixl_cu13", "nixl_cu12"):
        try:
            api = importlib.import_module(f"{package}._api")
            return api, importlib.import_module(f"{package}._bindings")
        except ImportError as error:
            tried.append(str(error))
    raise ImportError("install nixl-cu13 (or nixl-cu12): " + "; ".join(tried))
