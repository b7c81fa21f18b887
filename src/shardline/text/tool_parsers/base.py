"""What the parsers of tool calls have in common. A format is one file beside this one, found by its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from shardline.structured.grammar import lark_json, lark_text
from shardline.text.custom_input import CustomInput
from shardline.text.text_reader import Steps, TextReader, copy_value, read_string

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_ARGUMENT_KEYS = ("arguments", "parameters", "args")


class CallDelta(msgspec.Struct):
    """What is new in one tool call."""

    index: int
    name: str | None
    """The function's name, with the first delta of a call; None: an earlier delta had it."""
    arguments: str
    """The next part of the arguments' JSON text; of a custom tool, of its input."""
    is_custom: bool = False
    """Whether a custom tool is called."""


class AnswerDelta(msgspec.Struct):
    """What a piece of text adds to an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = []

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def start_call(self, index: int, name: str, *, is_custom: bool = False) -> None:
        """Add the beginning of a call."""
        self.calls.append(CallDelta(index, name, "", is_custom))

    def add_arguments(self, index: int, text: str, *, is_custom: bool = False) -> None:
        """Add text to the arguments of a call."""
        if self.calls and self.calls[-1].index == index:
            self.calls[-1].arguments += text
        else:
            self.calls.append(CallDelta(index, None, text, is_custom))


@dataclass(frozen=True)
class OfferedFunction:
    """A function that an answer may call; `parameters`: its JSON schema, None if it has no parameters."""

    name: str
    parameters: Mapping[str, Any] | None
    is_custom: bool = False
    """Whether it stands for a custom tool, see `custom_input`."""

    def arguments(self) -> str:
        """Its arguments, in Lark.

        Raises:
            ValueError: `parameters` is no schema.
        """
        schema = _NO_PARAMETERS if self.parameters is None else dict(self.parameters)
        if not schema.keys() & {"type", "$ref", "anyOf", "allOf", "oneOf"}:
            schema["type"] = "object"
        return lark_json(schema)


@dataclass(frozen=True)
class CallRules:
    """What the rules of a format depend on, and their common parts."""

    functions: Sequence[OfferedFunction]
    parallel: bool
    """Whether an answer may have more than one call."""
    template: str
    """The source of the chat template, for formats that have several forms."""
    special_tokens: Mapping[str, int]
    """The marks that are special tokens, and their ids. All other marks are text."""

    def mark(self, mark: str) -> str:
        """A mark of the format."""
        token_id = self.special_tokens.get(mark)
        return lark_text(mark) if token_id is None else f"<[{token_id}]>"

    @staticmethod
    def text(text: str) -> str:
        """A text."""
        return lark_text(text)

    @staticmethod
    def json(schema: Any) -> str:
        """A JSON value of this schema.

        Raises:
            ValueError: it is no schema.
        """
        return lark_json(schema)

    def function_rules(self, before: str, between: str, after: str) -> str:
        """The rule `function`: a name after the text `before`, then its arguments between two parts in Lark."""
        names = " | ".join(f"function_{index}" for index in range(len(self.functions)))
        rules = [f"function: {names}"]
        for index, function in enumerate(self.functions):
            name = before + function.name
            body = f"{lark_text(name)} {between} {function.arguments()} {after}"
            rules.append(f"function_{index}: {body}")
        return "\n".join(rules)

    def repeated(self, rule: str, separator: str) -> str:
        """One or, if allowed, several calls with a text between them."""
        if not self.parallel:
            return rule
        return f"{rule} ({lark_text(separator)} {rule})*" if separator else f"{rule}+"

    def last(self, rule: str, separator: str) -> str:
        """The same at the end of an answer, where a line break need not begin another call."""
        calls = self.repeated(rule, separator)
        return f"{calls} {lark_text(separator)}?" if separator.isspace() else calls

    def text_before(self, trigger: str, rule: str = "lead", terminal: str = "TEXT") -> str:
        """A rule for any text up to `trigger`, a mark, and for this mark; `terminal`: a name for the text."""
        if trigger in self.special_tokens:
            return f"{rule}: {terminal} {self.mark(trigger)}\n{terminal}: /(.|\\n)*/"
        return f"{rule}[lazy]: {terminal} {lark_text(trigger)}\n{terminal}: /(.|\\n)*/"


class ToolParser(ABC):
    """Splits one answer, as it arrives, into content and tool calls. A file's parser is its class `Parser`.

    The name of a call is sent as soon as it is known, and its arguments as they are written. Whitespace around calls
    is no content. Together the deltas do not depend on how the text is cut into pieces.
    """

    other_names: ClassVar[tuple[str, ...]] = ()
    """What the format is called besides its file's name."""
    template_marks: ClassVar[tuple[str, ...]]
    """Texts that all occur in chat templates of this format. Where those of several formats occur, most marks win."""
    markers: ClassVar[tuple[str, ...]]
    """Marks of the format that may be special tokens, and which the parser must see."""
    name_key: ClassVar[str] = "name"
    """Where calls are JSON objects: the key of the function's name."""

    def __init__(self, functions: Sequence[OfferedFunction], *, parallel: bool = True) -> None:
        """`functions`: those that the request offers; `parallel`: whether to report more than one call."""
        self._functions = {function.name: function for function in functions}
        self._parallel = parallel
        self._reader = TextReader()
        self._delta = AnswerDelta()
        self._space = ""
        """Whitespace that is content only if more content follows."""
        self._has_content = False
        self._follows_call = False
        self._has_arguments = False
        self._input: CustomInput | None = None
        """What decodes the arguments of the call that is read; None: it calls no custom tool."""
        self.num_calls = 0
        self._steps = self._parse()
        next(self._steps, None)

    @abstractmethod
    def _parse(self) -> Steps[None]:
        """Read the whole answer."""

    @classmethod
    @abstractmethod
    def write_rules(cls, rules: CallRules) -> str:
        """Two rules in Lark: `calls` for an answer that is tool calls, and `auto` for one that may have them.

        Raises:
            ValueError: a function's parameters are no schema.
        """

    @classmethod
    def call_marks(cls) -> tuple[str, ...]:
        """The marks that begin calls, also in reasoning that does not end before; empty: text may have each of them.

        A format with such marks has the rules `lead`, any text and its mark, and `rest`, what follows the mark.
        """
        return ()

    @staticmethod
    def call_id(source: bytes) -> str:
        """An id for a call from 12 random bytes, in the form that the format's chat templates take."""
        return f"call_{source.hex()}"

    def add_text(self, text: str) -> AnswerDelta:
        """What the next piece of text adds."""
        if self._reader.add_text(text):
            next(self._steps, None)
        return self._take_delta()

    def end_text(self, *, cut: bool = False) -> AnswerDelta:
        """What was held back until the end of the text; `cut`: although the answer had not come to its end."""
        self._reader.end_text(cut=cut)
        for _ in self._steps:
            pass
        if self.num_calls == 0:
            self._delta.content += self._space
        return self._take_delta()

    def _take_delta(self) -> AnswerDelta:
        delta, self._delta = self._delta, AnswerDelta(calls=[])
        return delta

    def _write_content(self, text: str) -> None:
        if self._follows_call:
            text = text.lstrip()
            if not text:
                return
            self._follows_call = False
            self._space = self._space if self._has_content else ""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._has_content |= bool(shown)
        self._delta.content += shown

    def _start_call(self, name: str) -> None:
        self._follows_call = True
        self._has_arguments = False
        self.num_calls += 1
        function = self._functions.get(name)
        self._input = CustomInput() if function is not None and function.is_custom else None
        if self._reports_call:
            self._delta.start_call(self.num_calls - 1, name, is_custom=self._input is not None)

    def _write_arguments(self, text: str) -> None:
        if text:
            self._has_arguments = True
            if self._input is not None:
                text = self._input.add_json(text)
            if text and self._reports_call:
                self._delta.add_arguments(self.num_calls - 1, text, is_custom=self._input is not None)

    def _end_call(self) -> None:
        """End a call that is whole. A call without arguments has an empty object."""
        if not self._has_arguments and self._input is None:
            self._write_arguments("{}")

    @property
    def _reports_call(self) -> bool:
        return self._parallel or self.num_calls <= 1

    def _read_arguments(self) -> Steps[bool]:
        """Read the arguments of the call that was started; returns whether they are whole."""
        first = yield from self._reader.peek()
        if first == "{":
            return (yield from copy_value(self._reader, self._write_arguments))
        if first == '"':  # the arguments' JSON as a string
            text = yield from read_string(self._reader)
            self._write_arguments(text or "")
            return text is not None
        words: list[str] = []
        whole = yield from copy_value(self._reader, words.append)
        if words != ["null"]:
            self._write_arguments("".join(words))
        return whole

    def _read_call(self, *, known_names_only: bool = False) -> Steps[bool]:
        """Read a call as an object, {"name": …, "arguments": …}, in any order of its keys.

        Returns whether it is a call. If not, and the text was not just cut, what was read becomes content.
        """
        reader = self._reader
        reader.start_record()
        name: str | None = None
        held: list[str] = []
        started = closed = False
        yield from reader.take_literal("{")
        while True:
            yield from reader.skip_space()
            if (yield from reader.take_literal("}")):
                closed = True
                break
            yield from reader.take_literal(",")
            yield from reader.skip_space()
            key = yield from read_string(reader)
            yield from reader.skip_space()
            if key is None or not (yield from reader.take_literal(":")):
                break
            yield from reader.skip_space()
            if key == self.name_key and not started:
                name = yield from read_string(reader)
                if name is None or (known_names_only and name not in self._functions):
                    break
                reader.take_record()
                self._start_call(name)
                started = True
                if held and held != ["null"]:
                    self._write_arguments("".join(held))
                whole = True
            elif key in _ARGUMENT_KEYS and started:
                whole = yield from self._read_arguments()
            elif key in _ARGUMENT_KEYS:
                whole = yield from copy_value(reader, held.append)
            else:
                whole = yield from copy_value(reader, lambda text: None)
            if not whole:
                break
        if started:
            if closed:
                self._end_call()
            return True
        self._give_up(reader.take_record(), is_markup=not known_names_only)
        return False

    def _read_list(self) -> Steps[None]:
        """Read calls as objects in a list, whose first bracket has been read."""
        reader = self._reader
        while True:
            yield from reader.skip_space()
            yield from reader.take_literal(",")
            yield from reader.skip_space()
            if (yield from reader.peek()) != "{":
                yield from reader.take_literal("]")
                return
            yield from self._read_call()

    def _give_up(self, text: str, *, is_markup: bool) -> None:
        """Write `text`, which is no call, as content, unless it is a call that was cut before its name was whole."""
        if not (is_markup and self._reader.is_at_end):
            self._write_content(text)
