"""The tokens of a tokenizer: their ids, spellings, bytes and texts."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

from shardline.structured.vocabulary import byte_alphabet
from shardline.text.special_tokens import FOREIGN_CODE

_REPLACEMENT = "\ufffd"


class Tokens:
    """Those of a `tokenizers` tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added tokens included. A model's embedding may have more rows, as padding."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        """All tokens, added tokens included, and their ids."""
        return dict(self.backend.get_vocab(with_added_tokens=True))

    def get_added_vocab(self) -> dict[str, int]:
        """The added tokens and their ids."""
        return {token.content: token_id for token_id, token in self.backend.get_added_tokens_decoder().items()}

    def token_id(self, token: str | None) -> int | None:
        """The id of this token. None: the vocabulary does not have it."""
        return None if token is None else self.backend.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it. None: the id is out of range."""
        return self.backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, even if they are only part of a character; empty if the id is out of range."""
        spelling = self.token(token_id)
        if spelling is None:
            return b""
        if spelling.startswith("▁"):
            # The decoder drops a leading space, so a token decoded alone would lose its own.
            return spelling.replace("▁", " ").encode()
        if len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">"):
            return bytes.fromhex(spelling[3:5])
        text = self.decode([token_id], skip_special_tokens=False)
        if _REPLACEMENT not in text:
            return text.encode()
        alphabet = byte_alphabet()
        if all(char in alphabet for char in spelling):
            return bytes(alphabet[char] for char in spelling)
        return text.encode()

    def token_text(self, token_id: int) -> str:
        """The text of one token. Bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are not UTF-8 become U+FFFD; ids out of range are left out."""
        with FOREIGN_CODE:
            return self.backend.decode(ids if isinstance(ids, list) else list(ids), skip_special_tokens)
