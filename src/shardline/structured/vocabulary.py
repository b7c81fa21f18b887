"""The model's tokens as bytes, which grammars are matched against."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers
    from llguidance import LLTokenizer

_END = b"<|end of the grammar|>"


class Vocabulary:
    """The tokens of one tokenizer.json, and one more token, `end_id`: a mask allows it where the answer may end.

    Special tokens match no text. All others do, added ones too: `<think>` is text if the tokenizer says so.
    """

    def __init__(self, source: bytes | tokenizers.Tokenizer) -> None:
        """`source`: the tokenizer, or the content of tokenizer.json. 150,000 tokens take about a second."""
        import tokenizers
        from llguidance import LLTokenizer

        backend = tokenizers.Tokenizer.from_buffer(source) if isinstance(source, bytes) else source
        tokens = _TokenBytes(backend)
        self.end_id = tokens.eos_token_id
        self.tokenizer: LLTokenizer = LLTokenizer(tokens, eos_token=[self.end_id])  # type: ignore[arg-type]
        self.num_words = -(-self.tokenizer.vocab_size // 32)
        """Length of a mask, in words of 32 bits."""


class _TokenBytes:
    """What llguidance asks of a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        size = max([*backend.get_vocab(with_added_tokens=True).values(), *added], default=-1) + 1
        is_byte_level = backend.decoder is not None and b'"ByteLevel"' in backend.decoder.__getstate__()
        spell = _byte_level if is_byte_level else _pieces
        self.tokens = [spell(backend.id_to_token(token_id) or "") for token_id in range(size)]
        for token_id, token in added.items():
            self.tokens[token_id] = token.content.encode()
        self.tokens.append(_END)
        self.bos_token_id = None
        self.eos_token_id = size
        self.special_token_ids = [size, *(token_id for token_id, token in added.items() if token.special)]
        self._backend = backend

    def __call__(self, text: str | bytes) -> list[int]:
        """The ids of a text."""
        decoded = text if isinstance(text, str) else text.decode("utf-8", "replace")
        ids: list[int] = self._backend.encode(decoded, add_special_tokens=False).ids
        return ids


def _byte_level(spelling: str) -> bytes:
    """The bytes of a token in GPT-2's alphabet."""
    alphabet = byte_alphabet()
    if all(char in alphabet for char in spelling):
        return bytes(alphabet[char] for char in spelling)
    return spelling.encode()


def _pieces(spelling: str) -> bytes:
    """The bytes of a token in the style of sentencepiece."""
    if len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">"):
        return bytes.fromhex(spelling[3:5])
    return spelling.replace("▁", " ").encode()


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable characters for the 256 bytes, as byte-level BPE vocabularies spell them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(rest)})
    return alphabet
