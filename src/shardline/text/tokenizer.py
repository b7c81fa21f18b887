"""Text to token ids and back, with the tokenizer files of a folder in Hugging Face format."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import tokenizers

from shardline.text.byte_level import ByteLevelDetokenizer, ByteTokens
from shardline.text.model_files import read_tokenizer
from shardline.text.special_tokens import FOREIGN_CODE, SpecialTokens
from shardline.text.spelled_tokens import SpelledTokens
from shardline.text.text_growth import check_growth
from shardline.text.tokens import Tokens
from shardline.text.window_detokenizer import WindowDetokenizer

MAX_INLINE_CHARS = 2048
"""Longest text that is encoded on the event loop, normalized. It takes about 0.3 ms; more would delay every stream."""
_PIECE_CHARS = 65_536


def check_text(text: object) -> None:
    """Refuse what no tokenizer takes.

    Raises:
        ValueError: it is no str, or it has half of a surrogate pair, which is no character.
    """
    if not isinstance(text, str):
        raise ValueError(f"a tokenizer encodes text (str), got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start + 1} of the text, {text[error.start]!r}, is half of a surrogate pair, and so no "
            "character: probably the text was not UTF-8"
        ) from None


class Detokenizer(Protocol):
    """Turns ids into the text that they add, and never returns half a character.

    The result does not depend on how the ids are grouped into calls: together the pieces are the text that follows the
    prompt in `tokenizer.decode(prompt + output)`.
    """

    def add_tokens(self, ids: Sequence[int]) -> str:
        """The text that the next ids add. An incomplete character is held back."""

    def flush_text(self) -> str:
        """The text held back so far; incomplete characters become U+FFFD. Call it after the last token."""


class Tokenizer(Tokens):
    """A `tokenizers` tokenizer and the special tokens of its tokenizer_config.json.

    `special_tokens` maps names such as "bos_token" to their text. `eos_token_ids` are all ids that end a text; the
    model's own ids (from generation_config.json, else config.json) come first.

    Raises:
        ValueError: the normalizer or the decoder can make a text so long that it fills the memory.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        super().__init__(backend)
        # Training scripts save both in tokenizer.json; they would cut prompts without a message.
        backend.no_truncation()
        backend.no_padding()
        self._growth = check_growth(backend.normalizer, "normalizer")
        check_growth(backend.pre_tokenizer, "pre-tokenizer")
        check_growth(backend.decoder, "decoder")
        self.special_tokens = dict(special_tokens or {})
        eos = self.token_id(self.special_tokens.get("eos_token"))
        self.bos_token_id = self.token_id(self.special_tokens.get("bos_token"))
        own = () if eos is None or eos in eos_token_ids else (eos,)
        self.eos_token_ids: tuple[int, ...] = (*eos_token_ids, *own)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        is_byte_level = type(backend.decoder).__name__ == "ByteLevel"
        self.byte_tokens = ByteTokens(backend.id_to_token, self.special_token_ids) if is_byte_level else None
        """The bytes of tokens. None: a text is not just the bytes of its tokens."""
        named = (*self.special_tokens.values(), *map(backend.id_to_token, self.eos_token_ids))
        self.special = SpecialTokens(backend, named)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """The tokenizer in `folder`, or in a GGUF file. None: the folder has none, so prompts must be token ids.

        Raises:
            ValueError: the files are broken, or they belong to a tokenizer that is not supported.
        """
        stored = read_tokenizer(folder)
        if stored is None:
            return None
        try:
            return cls(stored.backend, special_tokens=stored.special_tokens, eos_token_ids=stored.eos_token_ids)
        except ValueError as error:
            raise ValueError(f"{stored.file} cannot be used: {error}") from None

    @cached_property
    def spelled(self) -> SpelledTokens:
        """Keeps special tokens that users spell apart from those of the chat template."""
        return SpelledTokens(self.backend, self.special)

    def encode_text(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`.

        The post-processor of tokenizer.json decides which special tokens are added. As in transformers 5, an
        add_bos_token in tokenizer_config.json does not overrule it. A rendered chat template already contains its
        special tokens: encode it with add_special_tokens=False.

        Raises:
            ValueError: see `check_text`.
        """
        try:
            if len(text) * self._growth > MAX_INLINE_CHARS:
                # Unlike `encode`, this lets other threads run meanwhile.
                return self.encode_texts([text], add_special_tokens)[0]
            with FOREIGN_CODE:
                ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            check_text(text)
            raise
        return ids

    def token_offsets(self, text: str, add_special_tokens: bool) -> list[tuple[int, int]]:
        """Where each of a text's tokens stands in it: the first character, and the one behind the last. Special tokens
        that are added stand nowhere: (0, 0)."""
        with FOREIGN_CODE:
            [encoding] = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
        offsets: list[tuple[int, int]] = encoding.offsets
        return offsets

    def exceeds(self, text: str, limit: int) -> bool:
        """Whether `text` certainly has more than `limit` tokens; a long text is encoded piece by piece until it does.

        May be called on a thread. The bounds of pieces may cut tokens, so a text that is little too long passes.
        """
        if len(text) * self._growth <= limit:
            return False
        if len(text) // self._max_chars_per_token > limit:
            return True
        size = int(max(_PIECE_CHARS, limit) / self._growth)
        if len(text) <= 2 * size:
            return False
        count = 0
        for start in range(0, len(text), size):
            # `len` of an encoding makes no list of its ids, which would hold up other threads.
            with FOREIGN_CODE:
                count += len(self.backend.encode_batch([text[start : start + size]], add_special_tokens=False)[0])
            if count > limit + limit // 16 + start // size:
                return True
        return False

    @cached_property
    def _max_chars_per_token(self) -> int:
        """The most characters of a text that one token can stand for."""
        longest = max((len(token) for token in self.backend.get_vocab(with_added_tokens=True)), default=1)
        # Normalizers may join characters.
        return longest if self.backend.normalizer is None else 4 * longest

    async def encode_text_async(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """As `encode_text`; a long text is encoded on a thread, so that the event loop goes on."""
        if len(text) * self._growth <= MAX_INLINE_CHARS:
            return self.encode_text(text, add_special_tokens)
        return await asyncio.to_thread(self.encode_text, text, add_special_tokens)

    def encode_texts(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """The ids of each text, encoded in parallel."""
        try:
            with FOREIGN_CODE:
                return [e.ids for e in self.backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)]
        except TypeError:
            for text in texts:
                check_text(text)
            raise

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown_token_ids: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """The detokenizer of one choice. `shown_token_ids`: special tokens that are not skipped."""
        hidden = self.special_token_ids - shown_token_ids if skip_special_tokens else frozenset()
        if self.byte_tokens is not None:
            return ByteLevelDetokenizer(self.byte_tokens, prompt_token_ids, hidden)
        return WindowDetokenizer(self, prompt_token_ids, hidden)
