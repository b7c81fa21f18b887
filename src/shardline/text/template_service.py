"""What a sandbox's worker does with the chat templates of one model: it compiles them once, and renders conversations.

A job is the JSON of `Compile` or `Render`. The answer to the first one is the JSON of `Compiled`. The answer to the
second one is one character and a text: `RENDERED` and the prompt, or `REFUSED` and why there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import msgspec

from shardline.sandbox.nursery import Service
from shardline.text.chat_messages import normalize_messages
from shardline.text.template_sandbox import MAX_RENDERED_CHARS, compile_templates, reads_variable

__all__ = ["MAX_RENDERED_CHARS", "REFUSED", "RENDERED", "Compile", "Compiled", "Render", "encode_job", "open_service"]

RENDERED, REFUSED = b"t", b"r"
_MAX_REASON_CHARS = 2000


class Compile(msgspec.Struct, tag="compile"):
    """Compile the templates that later jobs use."""

    sources: dict[str, str]


class Compiled(msgspec.Struct):
    """Whether the templates show tools to the model, and why they cannot be compiled (empty: they were)."""

    takes_tools: bool = False
    error: str = ""


class Render(msgspec.Struct, tag="render"):
    """Render a conversation with the template `name`."""

    name: str
    messages: Any
    """OpenAI chat messages."""
    variables: dict[str, Any]
    max_chars: int


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


_ENCODER = msgspec.json.Encoder(enc_hook=_as_json)
_DECODER = msgspec.json.Decoder(Compile | Render)


def encode_job(job: Compile | Render) -> bytes:
    """The body of a job.

    Raises:
        TypeError: something in it is not JSON.
        ValueError: a text in it is not Unicode.
        RecursionError: it is nested too deeply.
    """
    return _ENCODER.encode(job)


class _Templates:
    """The templates of the last `Compile`."""

    def __init__(self) -> None:
        self._templates: dict[str, jinja2.Template] = {}
        self._sources: dict[str, str] = {}
        self._compiled = Compiled()

    def serve(self, body: bytes) -> bytes:
        """Do one job."""
        try:
            job = _DECODER.decode(body)
        except RecursionError:
            return REFUSED + b"the messages are nested too deeply"
        if isinstance(job, Compile):
            if job.sources != self._sources:
                self._compiled = self._compile(job.sources)
                self._sources = job.sources
            return msgspec.json.encode(self._compiled)
        try:
            return RENDERED + self._render(job).encode()
        except ValueError as error:
            return REFUSED + str(error)[:_MAX_REASON_CHARS].encode(errors="replace")

    def _compile(self, sources: dict[str, str]) -> Compiled:
        try:
            self._templates = compile_templates(sources)
            return Compiled("tool_use" in sources or reads_variable(sources.values(), "tools"))
        except ValueError as error:
            return Compiled(error=str(error)[:_MAX_REASON_CHARS])

    def _render(self, job: Render) -> str:
        values = {**job.variables, "messages": normalize_messages(job.messages)}
        try:
            return _render_bounded(self._templates[job.name], values, job.max_chars)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error
        except (TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"the chat template failed on these messages: {error}") from error


def _render_bounded(template: jinja2.Template, values: Mapping[str, Any], max_chars: int) -> str:
    pieces: list[str] = []
    size = 0
    for piece in template.generate(values):
        pieces.append(piece)
        size += len(piece)
        if size > max_chars:
            raise ValueError(f"the chat template wrote more than {max_chars} characters")
    return "".join(pieces)


def open_service(argument: str) -> Service:
    """The service; `argument` has no meaning."""
    compile_templates(
        {"default": "{% for m in messages %}{{ m.role | trim }}{% endfor %}"}
    )  # the first one takes longer
    return _Templates().serve
