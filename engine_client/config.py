"""ClientLimits: time limits of a client of an engine in another process."""

from __future__ import annotations

from dataclasses import dataclass

from process.settings import PositiveFloat, check_ranges


@dataclass(frozen=True)
class ClientLimits:
    """Time limits of one client, in seconds; every wait has one of them. Raises: SettingsError for
    a value out of range."""

    start_timeout_s: PositiveFloat = 600.0
    """Seconds for an engine to load, including the download of a checkpoint."""

    call_timeout_s: PositiveFloat = 60.0
    """Seconds for the answer to a call, which the engine handles between two steps."""

    silence_timeout_s: PositiveFloat = 300.0
    """Seconds of silence after which an engine with work counts as stuck and is killed. An engine
    reports about once a second, but not within a step."""

    write_timeout_s: PositiveFloat = 30.0
    """Seconds for the other side's socket to take one message."""

    stop_timeout_s: PositiveFloat = 5.0
    """Seconds for an engine to exit after Stop; then it is killed."""

    def __post_init__(self) -> None:
        check_ranges(self)
