"""Special tokens that a user spells in a conversation stay text.

The users' strings are searched before the chat template runs. If one spells a special token, it goes through the
template as a mark, a private-use character. The template's own special tokens are then written as aliases, which a
second tokenizer knows instead of the special tokens: all other text is plain for it.
"""

from __future__ import annotations

import json
import re
import secrets
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from types import TracebackType
from typing import Any
from urllib.parse import quote

import tokenizers

_MARKS = range(0xF0000, 0xFFFFE)
_ALIAS_CHARS = range(0x100000, 0x10FFFE)
_SECRET_CHARS = 6
_MARK = re.compile("[\U000f0000-\U000ffffd]")

_SEARCHED_CHARS = 65_536
"""So many characters are searched at a time, since nothing else runs meanwhile."""


class SpecialTokens:
    """The special tokens of a tokenizer, and ways to keep them out of the users' text.

    Args:
        backend: the tokenizer.
        names: further added tokens that are special although tokenizer.json does not say so.
    """

    def __init__(self, backend: tokenizers.Tokenizer, names: Iterable[str | None] = ()) -> None:
        named = set(names)
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._ids = {
            token.content: token_id
            for token_id, token in added.items()
            if (token.special or token.content in named) and token.content.strip()
        }
        self._others = [token for token in added.values() if token.content not in self._ids]
        self._flags = {token.content: token for token in added.values() if token.content in self._ids}
        # Such tokens are found in normalized text, where other spellings may have become theirs.
        self._spelled_in_other_ways = backend.normalizer is not None and any(
            token.normalized for token in self._flags.values()
        )
        self._named = named
        # No user can write an alias, since it has a secret.
        secret = "".join(chr(secrets.choice(_ALIAS_CHARS)) for _ in range(_SECRET_CHARS))
        self._aliases = {content: secret + _as_alias_chars(index) for index, content in enumerate(self._ids)}

    @cached_property
    def _spelling(self) -> _Spelling:
        return _Spelling(self._ids)

    def mark(self, values: Sequence[Any]) -> tuple[list[Any], Marks] | None:
        """The users' values for a chat template, with marks for the special tokens that they spell; see `encode`.

        Returns:
            None: they spell none, so that the rendered text can be encoded as it is.

        Raises:
            ValueError: the strings use all private-use characters, so that none is left for the marks.
        """
        if not self._ids:
            return None
        spelled = any(self._spelling.occurs_in(text) for text in _strings(values))
        if not spelled and not self._spelled_in_other_ways:
            return None
        marks = Marks(_strings(values))
        try:
            return [_replace(value, lambda text: self._spelling.replace(text, marks.of)) for value in values], marks
        except RecursionError as error:
            raise ValueError("the messages spell a special token, and are nested too deep") from error

    def encode(self, rendered: str, marks: Marks, add_special_tokens: bool) -> list[int]:
        """The ids of a rendered text with `marks`: only special tokens outside of the marks are special tokens."""
        own = self._spelling.pattern.sub(self._as_alias, rendered)
        with FOREIGN_CODE:
            [encoding] = self._plain.encode_batch([marks.resolve(own)], add_special_tokens=add_special_tokens)
        added_behind = encoding.special_tokens_mask
        return [
            token_id if behind else self._plain_ids.get(token_id, token_id)
            for token_id, behind in zip(encoding.ids, added_behind, strict=True)
        ]

    def _as_alias(self, match: re.Match[str]) -> str:
        if self._flags[match[0]].single_word:
            neighbours = (
                match.string[max(match.start() - 1, 0) : match.start()] + match.string[match.end() : match.end() + 1]
            )
            if any(map(_is_word_char, neighbours)):
                return match[0]  # as in the tokenizer, this is a part of a word
        return self._aliases[match[0]]

    def find_ambiguous(self) -> list[str]:
        """Special tokens that plain text becomes even so, because the tokenizer's model has them as words."""
        ambiguous = []
        for content in sorted({*self._ids, *(name for name in self._named if name)}):
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
        plain.add_tokens([_unspecial(token, token.content) for token in self._others])
        plain.add_tokens([_unspecial(token, self._aliases[content]) for content, token in self._flags.items()])
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


class _Spelling:
    """Finds special tokens in texts, and pieces at their ends that might become one with what a template puts there."""

    def __init__(self, contents: Iterable[str]) -> None:
        contents = list(contents)
        self.pattern = re.compile(_as_trie_pattern(contents))
        self._longest = max(map(len, contents))
        self._begins = {content[:size] for content in contents for size in range(2, len(content))}
        self._ends = {content[-size:] for content in contents for size in range(2, len(content))}
        self._first, self._last = {content[0] for content in contents}, {content[-1] for content in contents}

    def occurs_in(self, text: str) -> bool:
        """Whether the text spells a special token, or the beginning or end of one at its bounds."""
        for start in range(0, len(text), _SEARCHED_CHARS):
            if self.pattern.search(text, start, start + _SEARCHED_CHARS + self._longest):
                return True
        return bool(self._begin_at_end(text) or self._end_at_begin(text))

    def replace(self, text: str, mark: Callable[[str], str]) -> str:
        """The text with marks for all that `occurs_in` finds."""
        text = self.pattern.sub(lambda match: mark(match[0]), text)
        if size := self._begin_at_end(text):
            text = text[:-size] + mark(text[-size:])
        if size := self._end_at_begin(text):
            text = mark(text[:size]) + text[size:]
        return text

    def _begin_at_end(self, text: str) -> int:
        if self._first.isdisjoint(text[-self._longest :]):
            return 0
        sizes = range(min(self._longest - 1, len(text)), 1, -1)
        return next((size for size in sizes if text[-size:] in self._begins), 0)

    def _end_at_begin(self, text: str) -> int:
        if self._last.isdisjoint(text[: self._longest]):
            return 0
        sizes = range(min(self._longest - 1, len(text)), 1, -1)
        return next((size for size in sizes if text[:size] in self._ends), 0)


def _as_trie_pattern(contents: Iterable[str], depth: int = 0) -> str:
    """A pattern that finds the longest of these texts; its time does not grow with their number.

    `depth`: so many characters at their beginning are equal, and left out.
    """
    ordered = sorted(set(contents))
    bounds = zip(ordered[0], ordered[-1], strict=False)
    common = next((index for index, (first, last) in enumerate(bounds) if first != last), len(ordered[0]))
    head = re.escape(ordered[0][depth:common])
    longer = [content for content in ordered if len(content) > common]
    if not longer:
        return head
    branches = [_as_trie_pattern(group, common) for _, group in groupby(longer, lambda content: content[common])]
    return f"{head}(?:{'|'.join(branches)}){'?' if len(longer) < len(ordered) else ''}"


def _strings(values: Iterable[Any]) -> Iterator[str]:
    """All strings in these values, keys included."""
    pending = list(values)
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            pending.extend(value.keys())
            pending.extend(value.values())
        elif isinstance(value, Sequence):
            pending.extend(value)


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


class TokenizerError(ValueError):
    """A tokenizer failed on a text or on ids. The fault is the tokenizer's or the client's, not the server's."""


class _ForeignCode:
    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The library raises plain Exceptions. A panic of its Rust code is a BaseException, which no handler catches.
        if kind is not None and (kind is Exception or kind.__name__ == "PanicException"):
            raise TokenizerError(f"the tokenizer failed: {error}") from error


FOREIGN_CODE = _ForeignCode()
"""`with FOREIGN_CODE:` turns the library's own errors into TokenizerError."""
