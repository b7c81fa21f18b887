"""Errors of the tokenizers library, which is foreign code with a foreign configuration."""

from __future__ import annotations

from types import TracebackType


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
