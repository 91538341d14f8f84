"""Errors of this package, by whose mistake they are.

TokensError
  TokenizerError      the checkpoint's: tokenizer files missing, broken or of no streamable kind
  ChatTemplateError   the template's or the messages': none there, refused by it, output too long
    ReservedNameError   the caller's: an argument for the template that is not his to set
"""

from __future__ import annotations


class TokensError(Exception):
    """Root. The message is one line that says what and, where there is one, the fix."""


class TokenizerError(TokensError):
    """The tokenizer's files cannot be used."""


class ChatTemplateError(TokensError):
    """These messages cannot be rendered."""


class ReservedNameError(ChatTemplateError):
    """The template's argument of this name is set by others."""
