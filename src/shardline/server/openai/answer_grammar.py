"""The grammar that an answer is written in: of the form that a request asks for, of tool calls and of reasoning."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec

from shardline.sampling_params import StructuredOutputsParams
from shardline.server.errors import ApiError, bad_request, missing_parameter
from shardline.server.openai.answer_form import ResponseFormat
from shardline.server.openai.answer_format import AnswerFormat
from shardline.structured.checks import GrammarChecks
from shardline.structured.grammar import is_larger, wrap_grammar
from shardline.text.tool_parsers.base import CallRules

RENDERED = '{"grammars"'
"""The beginning of a whole answer's grammar, which a rendered request has."""
_INLINE_CHARS = 4096
"""The longest schemas and texts from which a grammar of calls is written on the event loop."""


async def make_answer_grammar(
    answer_format: AnswerFormat | None,
    response_format: ResponseFormat | None,
    structured_outputs: dict[str, Any] | None,
    checks: GrammarChecks,
    template: str = "",
    *,
    format_param: str = "response_format",
    disable_any_whitespace: bool | None = None,
) -> str:
    """The grammar of an answer; empty: it may be any text.

    `answer_format`: None if the answer is plain text. `template`: the source of the chat template.
    `format_param`: the field of the request that has `response_format`. `disable_any_whitespace`: what the server's
    configuration says, for requests that say nothing.

    Raises:
        ApiError: 400, a schema or grammar cannot be used; the message names what it lacks.
    """
    form, param = _requested_form(response_format, structured_outputs, format_param)
    grammar = ""
    if form is not None:
        if form.disable_any_whitespace is None:
            form = msgspec.structs.replace(form, disable_any_whitespace=disable_any_whitespace)
        try:
            if form.grammar is not None and form.grammar.startswith(RENDERED):
                await checks.check_grammar(form.grammar)
                return form.grammar
            grammar = await checks.write_grammar(form)
        except ValueError as error:
            raise _refusal(param, error) from error
    if answer_format is None or answer_format.is_plain:
        return grammar
    return await _add_calls_and_reasoning(answer_format, grammar, checks, template)


def _requested_form(
    response_format: ResponseFormat | None, structured_outputs: dict[str, Any] | None, format_param: str
) -> tuple[StructuredOutputsParams | None, str]:
    """The form that a request asks for, and the field that does so."""
    kind = "text" if response_format is None else response_format.type
    if kind == "json_schema" and response_format is not None:
        described = response_format.json_schema or {}
        if not isinstance(described.get("schema"), dict):
            name = "text.format.schema" if format_param == "text.format" else f"{format_param}.json_schema.schema"
            raise missing_parameter(name)
        form = StructuredOutputsParams(json=described["schema"])
    elif kind == "json_object":
        form = StructuredOutputsParams(json_object=True)
    elif kind == "structural_tag" and response_format is not None:
        fields = ("structures", "triggers", "format")
        given = {name: value for name in fields if (value := getattr(response_format, name)) is not None}
        form = StructuredOutputsParams(structural_tag=given)
    elif kind == "text":
        if structured_outputs is None:
            return None, ""
        try:
            return msgspec.convert(structured_outputs, StructuredOutputsParams), "structured_outputs"
        except ValueError as error:
            raise bad_request(f"Invalid value for 'structured_outputs': {error}.", "structured_outputs") from error
    else:
        raise bad_request(
            f"Invalid value for '{format_param}.type': '{kind}'; use 'text', 'json_object', 'json_schema' or "
            "'structural_tag'.",
            f"{format_param}.type",
        )
    if structured_outputs is not None:
        raise bad_request(f"Set '{format_param}' or 'structured_outputs', not both.", "structured_outputs")
    return form, format_param


async def _add_calls_and_reasoning(
    answer_format: AnswerFormat, grammar: str, checks: GrammarChecks, template: str
) -> str:
    """The grammar of an answer with tool calls and reasoning, whose content has `grammar` (empty: it is any text)."""
    use = answer_format.tool_use
    sources = [*([] if use is None else [function.parameters for function in use.offered]), grammar]
    try:
        if is_larger(sources, _INLINE_CHARS):
            whole = await asyncio.to_thread(_whole_grammar, answer_format, grammar, template)
        else:
            whole = _whole_grammar(answer_format, grammar, template)
    except ValueError as error:
        raise _refusal("tools", error) from error
    if not whole:
        return ""
    try:
        await checks.check_grammar(whole)
    except ValueError as error:
        if use is None or use.required or grammar:
            raise _refusal("tools" if use is not None else "response_format", error) from error
        # Calls of an answer that need not have any are not worth a refusal: they are read as the model writes them.
        return ""
    return whole


def _whole_grammar(answer_format: AnswerFormat, grammar: str, template: str) -> str:
    """The grammar of an answer with tool calls and reasoning; empty: it may be any text.

    Raises:
        ValueError: a function's parameters are no schema.
    """
    use = answer_format.tool_use
    rules = before = before_rules = ""
    answer = "@answer" if grammar else ""
    budget = None
    if answer_format.reasoning is not None:
        position = answer_format.prompt, answer_format.spell_mark
        budget = answer_format.budget
        before, before_rules = answer_format.reasoning.write_rules(*position, budget)
        answer = answer and answer_format.reasoning.content_rule(*position) + answer
    if use is not None:
        special = answer_format.special_marks(use.parser.markers)
        rules = use.parser.write_rules(CallRules(use.offered, use.parallel, template, special))
        answer = "calls" if use.required else f"calls | {answer}" if answer else "auto"
    if not answer and budget is not None and before:
        # Text that begins with the first mark would be reasoning without a limit.
        opening = re.escape(answer_format.reasoning.begin).replace("/", "\\/") if answer_format.reasoning else ""
        answer, rules = "ANYTHING", f"ANYTHING: /(.|\\n)*/ & ~/{opening}(.|\\n)*/"
    if not answer:
        return ""
    start = f"{before}answer"
    if before and budget is None and use is not None and answer_format.interrupting_marks:
        opening = "opening " if before.startswith("opened") else ""
        start += f" | {opening}lead rest{' auto' if answer == 'auto' and use.parallel else ''}"
    return wrap_grammar(f"start: {start}\nanswer: {answer}\n{rules}\n{before_rules}", grammar)


def _refusal(param: str, error: ValueError) -> ApiError:
    return bad_request(f"Invalid value for '{param}': {error}", param, "invalid_value")
