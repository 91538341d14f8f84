"""ClientLimits: how long a client of an engine in another process waits for what."""

from __future__ import annotations

from dataclasses import dataclass

from process.settings import PositiveFloat, check_ranges


@dataclass(frozen=True)
class ClientLimits:
    """Bounds of one client. Each wait has one of these. Raises SettingsError for a value out of
    range."""

    start_timeout_s: PositiveFloat = 600.0
    """For an engine to load: a checkpoint may be fetched in it."""

    call_timeout_s: PositiveFloat = 60.0
    """For the answer to a question, which comes between two steps."""

    silence_timeout_s: PositiveFloat = 300.0
    """An engine with work that says nothing for so long is stuck, and is killed. It
    says something about once a second, but not within a step."""

    write_timeout_s: PositiveFloat = 30.0
    """For one message to be taken by the other side's socket."""

    stop_timeout_s: PositiveFloat = 5.0
    """For an engine to end after it was told to; then it is killed."""

    def __post_init__(self) -> None:
        check_ranges(self)
