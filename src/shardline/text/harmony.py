"""The messages that gpt-oss writes (OpenAI's harmony format): a header with a channel, and a body.

An answer is several messages: reasoning in the channel `analysis`, what the user reads in `final`, and calls of tools
in `commentary`, whose header names the recipient.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardline.text.text_reader import Steps, TextReader

START, CHANNEL, DATA_TYPE, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, DATA_TYPE, MESSAGE, END, CALL, RETURN)
"""All of them end the body of a message. `<|start|>` and `<|channel|>` begin the next header."""
RECIPIENT = " to="
"""What follows the prompt if a header names its recipient before its channel."""

_FUNCTIONS = "functions."
_TO = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


@dataclass(frozen=True)
class Header:
    """What the header of a message says."""

    channel: str
    function: str
    """The function that the message calls; empty: it calls none."""
    has_recipient: bool

    @property
    def is_content(self) -> bool:
        """Whether the user reads the message."""
        return not self.has_recipient and self.channel != "analysis"


def parse_header(text: str) -> Header:
    """The header whose text, up to `<|message|>`, is `text`."""
    channel, recipient = _CHANNEL.search(text), _TO.search(text)
    name = "" if recipient is None else recipient[1]
    function = name.removeprefix(_FUNCTIONS) if name.startswith(_FUNCTIONS) else ""
    return Header("" if channel is None else channel[1], function, bool(name))


def read_header(reader: TextReader, beginning: str) -> Steps[Header | None]:
    """Read a header that begins with the text `begun`. None: it ends without a body."""
    words = [beginning]
    mark = yield from reader.copy_until((MESSAGE, START, END, CALL, RETURN), words.append)
    if mark == MESSAGE:
        return parse_header("".join(words))
    reader.unread(mark)
    return None


def read_first_mark(reader: TextReader) -> Steps[str]:
    """The text with which the answer's first header begins; empty: the answer begins otherwise."""
    if (yield from reader.take_mark(RECIPIENT)):
        return RECIPIENT
    return CHANNEL if (yield from reader.take_mark(CHANNEL)) else ""


def header_of_prompt(prompt: str) -> Header | None:
    """The header of the message within which a prompt ends. None: it ends before a message."""
    header, mark, body = prompt.rpartition(START)[2].partition(MESSAGE)
    if not mark or any(end in body for end in MARKERS):
        return None
    return parse_header(header)


def write_call_header(function: str) -> str:
    """The header of a message that calls a function."""
    return f"{CHANNEL}commentary{RECIPIENT}{_FUNCTIONS}{function} {DATA_TYPE}json{MESSAGE}"
