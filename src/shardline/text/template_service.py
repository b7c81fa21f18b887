"""What a sandbox's worker does with the chat templates of one model: it compiles them once, and renders conversations.

A template comes with the weights and is not trusted: it must not reach Python. What time and memory it may use is up to
the process in which it runs. The jobs are those of `text.template_jobs`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import msgspec

from shardline.sandbox.nursery import Service
from shardline.text.chat_messages import normalize_messages
from shardline.text.template_jobs import MAX_RENDERED_CHARS, REFUSED, RENDERED, Compile, Compiled, Render

_MAX_REASON_CHARS = 2000
_DECODER = msgspec.json.Decoder(Compile | Render)


def compile_templates(sources: Mapping[str, str]) -> dict[str, jinja2.Template]:
    """The templates of these jinja sources, by name.

    Raises:
        ValueError: a template does not parse; the message names it.
    """
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        optimized=False,  # nothing is computed before a template runs
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    templates = {}
    for name, source in sources.items():
        try:
            templates[name] = environment.from_string(source)
        except (jinja2.TemplateError, SyntaxError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"the chat template ({name}) is broken: {error}") from error
    return templates


def reads_variable(sources: Iterable[str], name: str) -> bool:
    """Whether one of these templates, which parse, reads the variable `name`."""
    environment = _Environment(extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
    return any(name in jinja2.meta.find_undeclared_variables(environment.parse(source)) for source in sources)


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """jinja's, which computes the output of constant expressions while it compiles, even without its optimizer."""

    def _output_child_to_const(self, node: jinja2.nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with a limit on the results of "*" and "**"."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset(["*", "**"])

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:  # as in the base class
        if operator == "**" and not (abs(left) <= 2**64 and abs(right) <= 64):
            raise jinja2.TemplateRuntimeError("a power in the template is too large")
        for sized, factor in ((left, right), (right, left)):
            repeats = isinstance(sized, (str, list, tuple)) and isinstance(factor, int)
            if repeats and len(sized) * factor > MAX_RENDERED_CHARS:
                raise jinja2.TemplateRuntimeError("a repetition in the template is too long")
        return super().call_binop(context, operator, left, right)


class _Namespace(jinja2.utils.Namespace):
    """jinja's namespace without underscored names, which could shadow attributes that Python looks up."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # "self" may be an attribute's name
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"the template sets {name!r}; names must not begin with an underscore")


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %}: training code needs the tag, a prompt needs only its content."""

    tags = {"generation"}  # noqa: RUF012  as the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML characters, and models were not trained on the escapes.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


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
        messages = normalize_messages(job.messages)
        if job.as_parts:
            messages = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
        values = {**job.variables, "messages": messages}
        templates = self._templates if job.source is None else compile_templates({job.name: job.source})
        try:
            return _render_bounded(templates[job.name], values, job.max_chars)
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
