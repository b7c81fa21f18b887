"""Special tokens that a user spells in a conversation stay text.

The users' strings are searched before the chat template runs. If one spells a special token, `spelled_tokens` keeps it
apart from those of the template.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from types import TracebackType
from typing import Any

import tokenizers

_SEARCHED_CHARS = 65_536
"""So many characters are searched at a time, since nothing else runs meanwhile."""


class SpecialTokens:
    """The special tokens of a tokenizer.

    Args:
        backend: the tokenizer.
        names: further added tokens that are special although tokenizer.json does not say so.
    """

    def __init__(self, backend: tokenizers.Tokenizer, names: Iterable[str | None] = ()) -> None:
        self.names = set(names)
        self.tokens = {
            token.content: token
            for token in backend.get_added_tokens_decoder().values()
            if (token.special or token.content in self.names) and token.content.strip()
        }
        """By their texts."""
        # Such tokens are found in normalized text, where other spellings may have become theirs.
        self._spelled_in_other_ways = backend.normalizer is not None and any(
            token.normalized for token in self.tokens.values()
        )

    @cached_property
    def spelling(self) -> Spelling:
        """Finds them; there must be some."""
        return Spelling(self.tokens)

    def may_occur_in(self, values: Sequence[Any]) -> bool:
        """Whether the strings in these values spell special tokens. If not, a chat can be encoded as it is rendered."""
        if not self.tokens:
            return False
        return self._spelled_in_other_ways or any(self.spelling.occurs_in(text) for text in strings_of(values))


class Spelling:
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
        return bool(self.begin_at_end(text) or self.end_at_begin(text))

    def begin_at_end(self, text: str) -> int:
        """The length of a special token's beginning at the end of a text; 0: there is none."""
        if self._first.isdisjoint(text[-self._longest :]):
            return 0
        sizes = range(min(self._longest - 1, len(text)), 1, -1)
        return next((size for size in sizes if text[-size:] in self._begins), 0)

    def end_at_begin(self, text: str) -> int:
        """The length of a special token's end at the beginning of a text; 0: there is none."""
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


def strings_of(values: Iterable[Any]) -> Iterator[str]:
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
