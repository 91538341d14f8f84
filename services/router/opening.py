"""Opening: the first command of a leg to its worker, which carries the prompt. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import Message

from services.router.wire_fields import nested


@dataclass(frozen=True)
class Opening:
    """A command of its key and one part: to set a message into another one copies it, which takes
    longer than to write it out.

    Attributes:
        head: the command without the part.
        number: the part's field in the command.
        part: not changed any more.
    """

    head: Message
    number: int
    part: Message

    def write(self) -> bytes:
        """As it goes over the wire."""
        return self.head.SerializeToString() + nested(self.number, self.part.SerializeToString())
