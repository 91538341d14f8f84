"""The bytes that one token id adds to a text: what logprobs name their tokens by.

One token may be part of a character, so bytes are the truth and its text only shows them. For
decoders that join tokens with spaces (WordPiece) it is the token's own spelling. Any thread.
"""

from __future__ import annotations

from tokens.tokenizer import Tokenizer, TokenKind

_SPACE_MARK = "\u2581"


class TokenBytes:
    """Of one tokenizer; remembers each id that was asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """Empty for an id without a token."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._bytes_of(token_id)
        return found

    def text_of(self, token_id: int) -> str:
        """`of` as text; U+FFFD for what is no whole character."""
        return self.of(token_id).decode("utf-8", errors="replace")

    def name_of(self, token_id: int) -> str:
        """A name that no token of other bytes has: its text, or for what is no whole character
        what OpenAI's completions write, `bytes:\\xf0\\x9f`.
        """
        data = self.of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            shown = (chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in data)
            return "bytes:" + "".join(shown)

    def is_control(self, token_id: int) -> bool:
        """Whether text leaves it out unless control tokens are asked for."""
        return self._tokenizer.kind(token_id) == TokenKind.SPECIAL

    def _bytes_of(self, token_id: int) -> bytes:
        tokenizer = self._tokenizer
        token = tokenizer.find_token(token_id)
        if token is None:
            return b""
        if tokenizer.kind(token_id) == TokenKind.BYTE:
            return bytes([int(token[3:5], 16)])
        if tokenizer.is_added(token_id):
            return token.encode()
        if tokenizer.is_byte_level:
            return b"".join(_BYTE_OF.get(character, character.encode()) for character in token)
        return token.replace(_SPACE_MARK, " ").encode()


def _byte_alphabet() -> dict[str, bytes]:
    """What stands for each byte in a byte-level vocabulary: the character of its number where that
    is printable, for the others those from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    alphabet.update({chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()
