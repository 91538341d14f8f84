"""AdmissionSettings: how many are served at once, how many may wait, and tenants' rates. Values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from process.settings import SettingsError


@dataclass(frozen=True)
class AdmissionSettings:
    """Which requests are served, wait or are refused under load."""

    max_active_requests: int = 768
    """Requests that are served at the same time; the others wait."""

    max_queued_requests: int = 1024
    """Requests that may wait; the next is refused with a retry time."""

    max_queued_per_tenant: int = 512
    """Of them, one tenant's, unless the file of API keys says otherwise."""

    num_steps_ahead: int = 3
    """Prompt tokens that may be under way without their first token, in engine steps of the prefill
    workers: one computes, one is on its way. Less is fairer, more keeps workers busier.
    """

    max_requests_per_min: int = 0
    """Rate limit of each tenant that the file of API keys does not name; 0: none."""

    max_tokens_per_min: int = 0
    """The same for tokens, of prompts and outputs together; 0: none."""

    rate_timeout_s: float = 0.1
    """For one answer of Redis about a rate; without one this router goes on alone."""

    def __post_init__(self) -> None:
        for name in (
            "max_active_requests",
            "max_queued_requests",
            "max_queued_per_tenant",
            "num_steps_ahead",
        ):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}: must be at least 1")
        for name in ("max_requests_per_min", "max_tokens_per_min"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name}: must not be negative")
        if not (math.isfinite(self.rate_timeout_s) and self.rate_timeout_s > 0):
            raise SettingsError("rate_timeout_s: must be above 0")
