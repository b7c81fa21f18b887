"""What tokens add to a text that is the bytes of its tokens, one after another, as in GPT-2, Llama 3 and Qwen."""

from __future__ import annotations

from collections.abc import Callable

from shardline.structured.vocabulary import byte_alphabet


class ByteTokens:
    """The bytes of tokens, each spelled once.

    `texts` has the texts of the tokens that were asked for, if they are whole characters and not special.
    """

    def __init__(self, spell: Callable[[int], str | None], special_token_ids: frozenset[int]) -> None:
        """`spell`: the token as the vocabulary spells it; None: the id is out of range."""
        self.texts: dict[int, str] = {}
        self._others: dict[int, bytes] = {}
        self._spell = spell
        self._special_token_ids = special_token_ids

    def decode(self, token_id: int) -> bytes:
        """What a token adds to the bytes of a text; empty if the id is out of range."""
        if token_id in self.texts:
            return self.texts[token_id].encode()
        if token_id in self._others:
            return self._others[token_id]
        spelling = self._spell(token_id) or ""
        alphabet = byte_alphabet()
        in_alphabet = all(char in alphabet for char in spelling)
        found = bytes(alphabet[char] for char in spelling) if in_alphabet else spelling.encode()
        try:
            text = found.decode()
        except UnicodeDecodeError:
            text = ""
        if text and token_id not in self._special_token_ids:
            self.texts[token_id] = text
        else:
            self._others[token_id] = found
        return found
