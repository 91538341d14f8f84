"""Programmatic dependent launch: a kernel that starts while the one before it in the stream ends.

A kernel compiled with OVERLAPS lets the next one start at once (griddepcontrol.launch_dependents)
and waits (griddepcontrol.wait) before it reads what a kernel of this step wrote, and before it
writes at all. Before the wait it may read weights and what the step was given: what was written
before the first kernel that overlaps. It saves most of the gap between two launches. Hopper and
later. Knows no operation. No state; any thread.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

_FIRST_CAPABILITY = (9, 0)


def overlap_options(tensor: torch.Tensor) -> dict[str, Any]:
    """Launch options of a kernel with a constexpr OVERLAPS, for the tensor's device."""
    overlaps = tensor.is_cuda and _can_overlap(tensor.device)
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps else {"OVERLAPS": False}


@lru_cache(maxsize=16)
def _can_overlap(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY
