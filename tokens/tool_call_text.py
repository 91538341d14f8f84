"""Tool calls in a model's text, read while the text comes: what is content, what is a call.

Each family of models writes its calls in a way of its own, which its chat template shows. A reader
takes the visible text in pieces of any size, and gives the same in sum however it is cut. Text that
begins like a call and is none stays content. Checks neither names nor arguments: a model may call
what does not exist. One thread at a time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tokens.json_call import ArgumentsOf, CallObject, JsonCall

_SPACE = " \t\r\n"
_BETWEEN = _SPACE + "[],;"
_NAME = re.compile(r"[\w.-]{1,64}(\[A?R?G?S?)?")


@dataclass(frozen=True)
class ToolCallFormat:
    """How a family of models writes calls: objects that begin behind a marker."""

    marker: str = ""
    """Empty: the first object begins the text, or there is none."""
    end: str = ""
    """Follows each object."""
    before: str = ""
    """What may stand before the first object as well."""
    is_special: bool = False
    """The marker is a control token, which text shows only if asked for."""
    has_names: bool = False
    """An object may be the arguments alone, with the name before it."""
    id_chars: int = 24
    """How long the id of a call is, in templates that mind."""


TAGGED = ToolCallFormat("<tool_call>", "</tool_call>")
"""<tool_call>{...}</tool_call>, one by one: Hermes, Qwen."""
MISTRAL = ToolCallFormat("[TOOL_CALLS]", is_special=True, has_names=True, id_chars=9)
"""[TOOL_CALLS][{...}, ...], or [TOOL_CALLS]name[ARGS]{...} for each."""
BARE = ToolCallFormat(before="<|python_tag|>")
"""Nothing but objects, with ; between them: Llama 3."""
LISTED = ToolCallFormat()
"""[{...}, ...] and nothing else: what a grammar makes of a call that is forced."""


def find_format(template: str) -> ToolCallFormat | None:
    """The format that a chat template (its source) shows; None: none that is known here."""
    if "<tool_call>" in template and "<function=" not in template:
        return TAGGED
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if '"parameters": ' in template and "<|eot_id|>" in template:
        return BARE
    return None


@dataclass(frozen=True)
class Content:
    """Text that is no call."""

    text: str


@dataclass(frozen=True)
class CallPart:
    """Part of a call: its first part has the name and the others more of the arguments."""

    index: int
    name: str = ""
    arguments: str = ""


Piece = Content | CallPart


class ToolCallReader(Protocol):
    """See the module."""

    is_cut: bool
    """The text ended inside a call that was handed on."""

    def feed(self, text: str) -> Sequence[Piece]:
        """Take more text."""

    def finish(self) -> Sequence[Piece]:
        """No more will come: what was held back."""


class OneCall:
    """The whole text is the arguments of one function."""

    is_cut = False  # its end is the text's, wherever that is

    def __init__(self, name: str) -> None:
        self._name = name

    def feed(self, text: str) -> Sequence[Piece]:
        name, self._name = self._name, ""
        return [CallPart(0, name, text)] if name or text else []

    def finish(self) -> Sequence[Piece]:
        return self.feed("")


class CallsInText:
    """Content, and calls of one format."""

    def __init__(self, form: ToolCallFormat) -> None:
        self.is_cut = False
        self._form = form
        self._space = ""  # before a marker: content, unless a call comes
        self._held = ""  # neither content nor part of an object so far
        self._call: CallObject | None = None
        self._num_calls = 0
        self._has_begun = False  # the present call's name was handed on
        self._mode = self._content if form.marker else self._between
        self._pieces: list[Piece] = []

    def feed(self, text: str) -> Sequence[Piece]:
        for character in text:
            self._mode(character)
        self._hand_on()
        return self._taken()

    def finish(self) -> Sequence[Piece]:
        self.is_cut = self._call is not None and self._has_begun
        if self._call is not None and not self._has_begun:
            self._add(self._space + self._held + self._call.raw)
        elif self._mode == self._between:
            self._add(self._space + self._lead())
        elif self._call is None and self._mode != self._after:
            self._add(self._held)
        self._space, self._held, self._call = "", "", None
        return self._taken()

    def _content(self, character: str) -> None:
        """Outside of calls; holds back what may become the marker, and space before it."""
        self._held += character
        if self._held.endswith(self._form.marker):
            before = self._held.removesuffix(self._form.marker)
            content = before.rstrip(_SPACE)
            self._add(content)
            self._space = before[len(content) :]
            self._held, self._mode = self._form.marker, self._between
            return
        end = len(self._held) - _num_held_back(self._held, self._form.marker)
        self._add(self._held[:end])
        self._held = self._held[end:]

    def _between(self, character: str) -> None:
        """Behind the marker, or between two objects: waits for the next one."""
        form = self._form
        lead = self._held.removeprefix(form.marker).strip(_BETWEEN)
        if character == "{":
            is_named = form.has_names and lead not in ("", form.before)
            self._call = ArgumentsOf(lead.partition("[")[0]) if is_named else JsonCall()
            self._has_begun, self._mode = False, self._object
            self._object(character)
            return
        self._held += character
        if self._num_calls and form.marker and self._held.endswith(form.marker):
            self._held = form.marker
            return
        lead = self._held.removeprefix(form.marker).strip(_BETWEEN)
        may_be_name = form.has_names and _NAME.fullmatch(lead) is not None
        if lead and not (may_be_name or form.before.startswith(lead)):
            self._give_up(self._lead())

    def _object(self, character: str) -> None:
        call = self._call
        assert call is not None, "an object is being read"
        call.feed(character)
        if call.is_broken and not self._has_begun and call.name is None:
            self._call = None
            self._give_up(self._held + call.raw)
        elif call.is_broken or call.is_over:
            self._hand_on()
            self._call, self._held = None, ""
            self._num_calls += 1
            self._mode = self._after if self._form.end else self._between

    def _after(self, character: str) -> None:
        """Swallows up to the end marker."""
        self._held += character
        if self._held.endswith(self._form.end):
            self._held, self._mode = "", self._content

    def _give_up(self, text: str) -> None:
        """What looked like a call is none; its last character may begin one."""
        self._add(self._space + text[:-1])
        self._space = self._held = ""
        self._mode = self._content if self._form.marker else self._only_content
        self._mode(text[-1])

    def _only_content(self, character: str) -> None:
        self._add(character)

    def _lead(self) -> str:
        """What waits for an object, as content; what separates objects is none."""
        if self._num_calls and not (self._form.marker and self._held.startswith(self._form.marker)):
            return self._held.strip(_BETWEEN)
        return self._held

    def _hand_on(self) -> None:
        """What is known of the present call."""
        call = self._call
        if call is None or call.name is None:
            return
        name = "" if self._has_begun else call.name
        arguments = call.take_arguments()
        if name or arguments:
            self._pieces.append(CallPart(self._num_calls, name, arguments))
            self._space, self._has_begun = "", True

    def _add(self, text: str) -> None:
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, Content):
            self._pieces[-1] = Content(last.text + text)
        else:
            self._pieces.append(Content(text))

    def _taken(self) -> Sequence[Piece]:
        taken, self._pieces = self._pieces, []
        return taken


def _num_held_back(text: str, marker: str) -> int:
    """Characters at the end of `text` that may belong to a marker, with the space before it."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            break
    else:
        size = 0
    before = text[: len(text) - size]
    return size + len(before) - len(before.rstrip(_SPACE))
