"""Kimi K3: reasoning and content in channels."""

from __future__ import annotations

from shardline.text.reasoning_parsers.enclosed import EnclosedParser

_OPEN, _CLOSE, _SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"


class Parser(EnclosedParser):
    """`<|open|>think<|sep|>…<|close|>think<|sep|>`, then the same with `response`. The prompt may end within either."""

    begin = f"{_OPEN}think{_SEPARATOR}"
    end = f"{_CLOSE}think{_SEPARATOR}"
    content_begin = f"{_OPEN}response{_SEPARATOR}"
    content_end = f"{_CLOSE}response{_SEPARATOR}"
    dropped = (content_begin, content_end, f"{_CLOSE}message{_SEPARATOR}")
    markers = (_OPEN, _CLOSE, _SEPARATOR)
