"""AdmissionSettings: how many are served at once, how many may wait, and tenants' rates. Values."""

from __future__ import annotations

from dataclasses import dataclass

from process.settings import NonNegativeInt, PositiveFloat, PositiveInt, check_ranges


@dataclass(frozen=True)
class AdmissionSettings:
    """Which requests are served, wait or are refused under load."""

    max_active_requests: PositiveInt = 768
    """Requests that are served at the same time; the others wait."""

    max_queued_requests: PositiveInt = 1024
    """Requests that may wait; the next is refused with a retry time."""

    max_queued_per_tenant: PositiveInt = 512
    """Of them, one tenant's, unless the file of API keys says otherwise."""

    num_steps_ahead: PositiveInt = 3
    """Prompt tokens that may be under way without their first token, in engine steps of the prefill
    workers: one computes, one is on its way. Less is fairer, more keeps workers busier.
    """

    max_requests_per_min: NonNegativeInt = 0
    """Rate limit of each tenant that the file of API keys does not name; 0: none."""

    max_tokens_per_min: NonNegativeInt = 0
    """The same for tokens, of prompts and outputs together; 0: none."""

    rate_timeout_s: PositiveFloat = 0.1
    """For one answer of Redis about a rate; without one this router goes on alone."""

    def __post_init__(self) -> None:
        check_ranges(self)
