"""Where a model's tool call ends: the markers that its own tokenizer or chat template name.

A marker that is a control token is found by its id, because its text is not shown; any other is
found in the text, like a stop string, and stays visible: whoever parses the call needs it. Does NOT
parse calls. Values; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokens.tokenizer import Tokenizer, TokenKind

MARKERS = (
    "</tool_call>",  # Hermes, Qwen
    "<|eom_id|>",  # Llama 3.1: end of a message that waits for a tool
    "<|call|>",  # gpt-oss (harmony)
    "<｜tool▁calls▁end｜>",  # noqa: RUF001 - DeepSeek writes it so
    "<|tool_calls_section_end|>",  # Kimi K2
    "<|tool_call_end|>",  # LFM2
    "<end_function_call>",  # FunctionGemma
)
"""What ends a tool call, by the model families that publish it in their templates."""


@dataclass(frozen=True)
class ToolCallEnds:
    """What ends a tool call of one model."""

    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether this model has an end of tool calls at all."""
        return bool(self.token_ids or self.strings)


def find_tool_call_ends(tokenizer: Tokenizer, template: str) -> ToolCallEnds:
    """The markers of the model with this tokenizer and chat template (its source; empty: none)."""
    token_ids: set[int] = set()
    strings: list[str] = []
    for marker in MARKERS:
        token_id = tokenizer.find_token_id(marker)
        if token_id is not None and tokenizer.kind(token_id) == TokenKind.SPECIAL:
            token_ids.add(token_id)
        elif token_id is not None or marker in template:
            strings.append(marker)
    return ToolCallEnds(frozenset(token_ids), tuple(strings))
