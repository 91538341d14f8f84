"""A checkpoint's chat template: messages to the prompt text its model was trained on.

The template is code from whoever made the checkpoint. It runs in Jinja's immutable sandbox, sees
plain values only, and its output is bounded while it is made. The environment (whitespace rules,
globals, filters) is the one `transformers` gives to templates, so that both render the same text.

Does NOT know token ids. Immutable once loaded; any thread may call it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tokens.errors import ChatTemplateError, ReservedNameError, TokenizerError

MAX_OUTPUT_CHARS = 16 * 1024 * 1024
"""Most characters one rendering may yield: four times the largest request. Guessed; a sane chat
adds a few a message.
"""

# Settings of `tokenizer_config.json` that templates see as variables of the same name.
_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables that the caller's arguments cannot be."""


class ChatTemplate:
    """One compiled template with its checkpoint's special tokens."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
        max_output_chars: int = MAX_OUTPUT_CHARS,
    ) -> None:
        """Raises: ChatTemplateError when `source` is no valid template."""
        self._max_output_chars = max_output_chars
        self._special_tokens = dict(special_tokens)
        self.source = source
        try:
            environment = _environment(now, max_output_chars)
            self._template = environment.from_string(source)
            self._variables = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template is broken: {error}") from error

    @classmethod
    def find(cls, folder: Path) -> ChatTemplate | None:
        """The template of the checkpoint in `folder`: `chat_template.jinja`, else the one in
        `tokenizer_config.json`.

        Returns: None when the checkpoint has none.
        Raises: TokenizerError when a file is there but cannot be read; ChatTemplateError when the
            template is broken.
        """
        config = _read_json(folder / "tokenizer_config.json")
        file = folder / "chat_template.jinja"
        try:
            source = file.read_text(encoding="utf-8") if file.is_file() else _default_of(config)
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{file}: cannot be read: {error}") from error
        if source is None:
            return None
        older = _read_json(folder / "special_tokens_map.json")
        return cls(source, special_tokens=_special_tokens_of({**older, **config}))

    @property
    def takes_tools(self) -> bool:
        """Whether the template looks at `tools` at all."""
        return "tools" in self._variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages` (each with `role` and `content`), ready for the model's answer.

        `tools`: what the model may call, as OpenAI writes it; `arguments`: further variables of the
        template.
        Raises: ReservedNameError for an argument that is ours to set; ChatTemplateError when the
            template refuses them, fails on them, or its output is too long.
        """
        given = dict(arguments or {})
        for name in given:
            if name in _OURS or name in self._special_tokens:
                raise ReservedNameError(f"'{name[:64]}' is not the request's to set")
        size, pieces = 0, []
        try:
            for piece in self._template.generate(
                given,
                messages=[dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            ):
                size += len(piece)
                if size > self._max_output_chars:
                    raise ChatTemplateError(
                        f"the chat template's output is over {self._max_output_chars} characters"
                    )
                pieces.append(piece)
        # A template may fail like any program: None + str, a missing key, a division by zero,
        # endless recursion.
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AttributeError,
            RecursionError,
        ) as error:
            raise ChatTemplateError(f"the chat template refused these messages: {error}") from error
        return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, and a bound on the operators that could make a huge value out of a small one."""

    intercepted_binops = frozenset({"*", "**", "+"})
    max_chars = MAX_OUTPUT_CHARS

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Raises: SecurityError when the result would be longer than any allowed output."""
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(count, int) and isinstance(sequence, str | list | tuple):
                    self._check(len(sequence) * max(count, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._check(left.bit_length() * max(right, 0))
        elif isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            self._check(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def _check(self, size: int) -> None:
        if size > self.max_chars:
            raise jinja2.exceptions.SecurityError(
                f"a value would be over {self.max_chars} characters"
            )


class _Namespace(Namespace):
    """Jinja's namespace without underscore names, so that a template cannot reach Python's
    internals through one.
    """

    def __init__(
        *args: Any, **kwargs: Any
    ) -> None:  # no named self: `namespace(self=...)` is allowed
        namespace, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(namespace, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class _Dict:
    """The `dict` of templates: makes dicts, has none of the type's other attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it is
    just its body.
    """

    tags: set[str] = {"generation"}  # noqa: RUF012, Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


def _environment(now: Callable[[], datetime], max_output_chars: int) -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.max_chars = max_output_chars
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda layout: now().strftime(layout),
        dict=_Dict(),
        namespace=_Namespace,
    )
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models never saw.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold '{name}'")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file}: expected a JSON object")
    return value


def _default_of(config: Mapping[str, Any]) -> str | None:
    """The default template of a tokenizer config, which has one or a list of named ones."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by role; each is spelled as a string or as an object with its `content`."""
    tokens = {}
    for role in _SPECIAL_TOKENS:
        value = config.get(role)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            tokens[role] = value
    return tokens
