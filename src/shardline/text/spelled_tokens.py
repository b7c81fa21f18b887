"""Special tokens in a rendered chat: the template's own are tokens, those that a user spells stay text.

What a user spells goes through the template as a mark, a private-use character. The template's own special tokens are
then written as aliases, which a second tokenizer knows instead of the special tokens: all other text is plain for it.
"""

from __future__ import annotations

import json
import re
import secrets
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any
from urllib.parse import quote

import tokenizers

from shardline.text.special_tokens import FOREIGN_CODE, SpecialTokens, TokenizerError, strings_of

_MARKS = range(0xF0000, 0xFFFFE)
_ALIAS_CHARS = range(0x100000, 0x10FFFE)
_SECRET_CHARS = 6
_MARK = re.compile("[\U000f0000-\U000ffffd]")


class SpelledTokens:
    """Keeps special tokens that users spell apart from those of the chat template.

    Args:
        backend: the tokenizer.
        special: its special tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialTokens) -> None:
        self._backend = backend
        self._special = special
        # No user can write an alias, since it has a secret.
        secret = "".join(chr(secrets.choice(_ALIAS_CHARS)) for _ in range(_SECRET_CHARS))
        self._aliases = {content: secret + _as_alias_chars(index) for index, content in enumerate(special.tokens)}

    def mark(self, values: Sequence[Any]) -> tuple[list[Any], Marks]:
        """The users' values for a chat template, with marks for the special tokens that they spell; see `encode`.

        Raises:
            ValueError: the strings use all private-use characters, so that none is left for the marks.
        """
        marks = Marks(strings_of(values))
        try:
            return [_replace(value, lambda text: self._mark_text(text, marks)) for value in values], marks
        except RecursionError as error:
            raise ValueError("the messages spell a special token, and are nested too deep") from error

    def _mark_text(self, text: str, marks: Marks) -> str:
        spelling = self._special.spelling
        text = spelling.pattern.sub(lambda match: marks.of(match[0]), text)
        if size := spelling.begin_at_end(text):
            text = text[:-size] + marks.of(text[-size:])
        if size := spelling.end_at_begin(text):
            text = marks.of(text[:size]) + text[size:]
        return text

    def encode(self, marks: Marks, rendered: str, add_special_tokens: bool) -> list[int]:
        """The ids of a rendered text with `marks`: only special tokens outside of the marks are special tokens."""
        own = self._special.spelling.pattern.sub(self._as_alias, rendered)
        with FOREIGN_CODE:
            [encoding] = self._plain.encode_batch([marks.resolve(own)], add_special_tokens=add_special_tokens)
        added_behind = encoding.special_tokens_mask
        return [
            token_id if behind else self._plain_ids.get(token_id, token_id)
            for token_id, behind in zip(encoding.ids, added_behind, strict=True)
        ]

    def _as_alias(self, match: re.Match[str]) -> str:
        if self._special.tokens[match[0]].single_word:
            neighbours = (
                match.string[max(match.start() - 1, 0) : match.start()] + match.string[match.end() : match.end() + 1]
            )
            if any(map(_is_word_char, neighbours)):
                return match[0]  # as in the tokenizer, this is a part of a word
        return self._aliases[match[0]]

    def find_ambiguous(self) -> list[str]:
        """Special tokens that plain text becomes even so, because the tokenizer's model has them as words."""
        ambiguous = []
        for content in sorted({*self._special.tokens, *filter(None, self._special.names)}):
            token_id = self._backend.token_to_id(content)
            try:
                with FOREIGN_CODE:
                    if token_id is not None and token_id in self._plain.encode(content, add_special_tokens=False).ids:
                        ambiguous.append(content)
            except TokenizerError:
                continue  # requests with this text are refused
        return ambiguous

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The tokenizer with aliases instead of special tokens. It shares the model."""
        plain = tokenizers.Tokenizer(self._backend.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if getattr(self._backend, part) is not None:
                setattr(plain, part, getattr(self._backend, part))
        added = self._backend.get_added_tokens_decoder().values()
        others = [token for token in added if token.content not in self._special.tokens]
        plain.add_tokens([_unspecial(token, token.content) for token in others])
        plain.add_tokens([_unspecial(token, self._aliases[content]) for content, token in self._special.tokens.items()])
        return plain

    @cached_property
    def _plain_ids(self) -> dict[int, int]:
        """The ids of added tokens in `_plain`, and what they are in the tokenizer."""
        ids = {token.content: token_id for token_id, token in self._backend.get_added_tokens_decoder().items()}
        ids.update((alias, ids[content]) for content, alias in self._aliases.items())
        return {plain_id: ids[token.content] for plain_id, token in self._plain.get_added_tokens_decoder().items()}


class Marks:
    """Private-use characters that stand for pieces of the users' text while a template runs.

    `texts`: all strings of the users; no mark occurs in them.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._taken = {char for text in texts for char in _MARK.findall(text)}
        self._by_piece: dict[str, str] = {}

    def of(self, piece: str) -> str:
        """The mark of a piece.

        Raises:
            ValueError: all private-use characters are in use.
        """
        mark = self._by_piece.get(piece)
        if mark is None:
            if 2 * len(self._taken) > len(_MARKS):
                raise ValueError("the messages spell a special token, and use too many private-use characters")
            mark = next(char for char in iter(_random_mark, "") if char not in self._taken)
            self._taken.add(mark)
            self._by_piece[piece] = mark
        return mark

    def recover(self, rendered: str) -> str:
        """The rendered text, where marks that became JSON escapes are marks again.

        Raises:
            ValueError: a mark became something else.
        """
        for piece, mark in self._by_piece.items():
            rendered = rendered.replace(json.dumps(mark)[1:-1], mark)
            if quote(mark) in rendered:
                raise ValueError(f"the messages spell {piece!r}, and the chat template does not show it as text")
        return rendered

    def resolve(self, text: str) -> str:
        """The text with the pieces in place of their marks."""
        return text.translate({ord(mark): piece for piece, mark in self._by_piece.items()})


def _replace(value: Any, replace: Callable[[str], str]) -> Any:
    """The value with `replace(text)` for each of its strings."""
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, Mapping):
        return {_replace(key, replace): _replace(item, replace) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_replace(item, replace) for item in value]
    return value


def _unspecial(token: tokenizers.AddedToken, content: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )


def _is_word_char(char: str) -> bool:
    category = unicodedata.category(char)
    return category[0] in "LM" or category in ("Nd", "Nl", "Pc")


def _as_alias_chars(number: int) -> str:
    high, low = divmod(number, len(_ALIAS_CHARS))
    return chr(_ALIAS_CHARS[high]) + chr(_ALIAS_CHARS[low])


def _random_mark() -> str:
    return chr(secrets.choice(_MARKS))
