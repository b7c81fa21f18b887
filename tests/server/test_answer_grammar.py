"""The grammar of whole answers: reasoning, then calls or the form that was asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from shardline.checkpoints.hub import DEMO_FOLDER
from shardline.server.errors import ApiError
from shardline.server.openai.answer_format import AnswerFormat
from shardline.server.openai.answer_grammar import make_answer_grammar
from shardline.server.openai.chat.tools import FunctionDefinition, ToolUse
from shardline.server.openai.protocol import ResponseFormat
from shardline.structured.checks import GrammarChecks
from shardline.structured.compiler import GrammarCompiler
from shardline.text.reasoning_parsers import find_reasoning_parser
from shardline.text.tokenizer import Tokenizer
from shardline.text.tool_parsers import find_tool_parser
from tests.structured.test_grammar import accepts

TOKENIZER = Tokenizer.from_folder(Path(DEMO_FOLDER))
COMPILER = GrammarCompiler((Path(DEMO_FOLDER) / "tokenizer.json").read_bytes())
CHECKS = GrammarChecks()
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORM = ResponseFormat(type="json_schema", json_schema={"schema": SCHEMA})
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def use_tools(required: bool, parameters: dict[str, Any] = SCHEMA, parser: str = "hermes") -> ToolUse:
    function = FunctionDefinition(name="f", parameters=parameters)
    return ToolUse((function,), required, True, find_tool_parser(parser))


def grammar(
    tools: ToolUse | None = None, reasoning: str | None = None, prompt: str = "", form: ResponseFormat | None = None
) -> str:
    assert TOKENIZER is not None
    parser = None if reasoning is None else find_reasoning_parser(reasoning)

    return asyncio.run(make_answer_grammar(AnswerFormat(TOKENIZER, prompt, tools, parser), form, None, CHECKS))


@pytest.mark.parametrize(
    ("reasoning", "prompt", "good", "bad"),
    [
        (None, "", ['{"a": 1}'], ['<think>x</think>{"a": 1}']),
        ("qwen3", "", ['{"a": 1}', '<think>{"b"}</think>\n\n{"a": 1}'], ['x{"a": 1}', "<think>x</think>x"]),
        ("qwen3", "<think>\n", ['x</think>{"a": 1}'], ['{"a": 1}', "x</think>{}"]),
        ("qwen3", "<think>\n\n</think>\n\n", ['{"a": 1}'], ['x</think>{"a": 1}']),
        ("deepseek_r1", "", ['<think>x</think>\n{"a": 1}', 'x</think>{"a": 1}'], ['{"a": 1}']),
    ],
)
def test_grammars_begin_after_reasoning(reasoning: str | None, prompt: str, good: list[str], bad: list[str]) -> None:
    made = grammar(reasoning=reasoning, prompt=prompt, form=FORM)
    for text in good:
        assert accepts(COMPILER, made, text), text
    for text in bad:
        assert not accepts(COMPILER, made, text), text


def test_the_server_may_allow_whitespace_where_requests_say_nothing() -> None:
    spaced = '{\n"a":   1}'
    for form, asked, configured, taken in (
        (FORM, None, None, False),
        (FORM, None, False, True),
        (None, {"json": SCHEMA}, False, True),
        (None, {"json": SCHEMA, "disable_any_whitespace": True}, False, False),
    ):
        made = asyncio.run(make_answer_grammar(None, form, asked, CHECKS, disable_any_whitespace=configured))
        assert accepts(COMPILER, made, spaced) is taken


def test_reasoning_before_calls() -> None:
    required = grammar(use_tools(True), "qwen3")
    assert accepts(COMPILER, required, "<think>hm</think>\n" + CALL)
    assert not accepts(COMPILER, required, "<think>hm</think>\nHello")
    auto = grammar(use_tools(False), "qwen3")
    for text in ("Hello", "<think>hm</think>\nHello", "<think>hm</think>\nHello " + CALL):
        assert accepts(COMPILER, auto, text), text


def test_messages_of_gpt_oss() -> None:
    note = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
    final, form = "<|channel|>final<|message|>", '<|channel|>final <|constrain|>json<|message|>{"a": 1}'
    both = grammar(use_tools(False, parser="gpt_oss"), "gpt_oss", "<|start|>assistant", FORM)
    for text in (note + call, note + note + form, form):
        assert accepts(COMPILER, both, text), text
    for text in (note + final + "Hello", final + "{}", note, '{"a": 1}'):
        assert not accepts(COMPILER, both, text), text
    required = grammar(use_tools(True, parser="gpt_oss"), "gpt_oss")
    assert accepts(COMPILER, required, note + call)
    assert not accepts(COMPILER, required, note + final)
    assert accepts(COMPILER, grammar(use_tools(False, parser="gpt_oss"), "gpt_oss"), note + final + "Hello")
    continued = grammar(None, "gpt_oss", "<|start|>assistant<|channel|>final<|message|>", FORM)
    assert accepts(COMPILER, continued, '{"a": 1}')
    thinking = grammar(None, "gpt_oss", "<|start|>assistant<|channel|>analysis<|message|>", FORM)
    assert accepts(COMPILER, thinking, "hm<|end|><|start|>assistant" + form)


def test_a_form_and_tools() -> None:
    made = grammar(use_tools(False), form=FORM)
    assert accepts(COMPILER, made, CALL)
    assert accepts(COMPILER, made, '{"a": 1}')
    assert not accepts(COMPILER, made, "Hello")


def test_plain_answers_have_no_grammar() -> None:
    assert grammar() == ""
    assert grammar(reasoning="qwen3") == ""


def test_schemas_that_cannot_be_compiled() -> None:
    """A required call could not be kept valid; others are read as the model writes them."""
    assert grammar(use_tools(False, {"not": {}})) == ""
    with pytest.raises(ApiError, match="not"):
        grammar(use_tools(True, {"not": {}}))


def test_structural_tags_are_a_form_of_answers() -> None:
    tag = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
    tree = {"type": "triggered_tags", "triggers": ["<f>"], "tags": [tag]}
    older = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
    for given in (older, {"format": tree}):
        form = ResponseFormat.model_validate({"type": "structural_tag", **given})
        made = grammar(None, "qwen3", "<think>\n", form)
        assert accepts(COMPILER, made, '<f>x</think>Hi <f>{"a": 1}</f>!')
        assert not accepts(COMPILER, made, "x</think>Hi <f>{}</f>")
    for given in (older, {"format": tree}):
        made = asyncio.run(make_answer_grammar(None, None, {"structural_tag": given}, CHECKS))
        assert accepts(COMPILER, made, '<f>{"a": 1}</f>')
    with pytest.raises(ApiError, match="'format' has the type 'dispatch'"):
        grammar(form=ResponseFormat(type="structural_tag", format={"type": "dispatch"}))


def test_reasoning_may_have_a_budget() -> None:
    backend = tokenizers.Tokenizer.from_file(str(Path(DEMO_FOLDER) / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken(mark, special=False) for mark in ("<think>", "</think>")])
    tokenizer, compiler = Tokenizer(backend), GrammarCompiler(backend)

    def allows(prompt: str, text: str, budget: int, form: ResponseFormat | None = None) -> bool:
        parser = find_reasoning_parser("qwen3")
        answer = AnswerFormat(tokenizer, prompt, None, parser, budget)
        matcher = compiler.start_grammar(asyncio.run(make_answer_grammar(answer, form, None, CHECKS)))
        for token_id in backend.encode(text, add_special_tokens=False).ids:
            words, _ = matcher.find_allowed()
            if not words[token_id >> 5] >> (token_id & 31) & 1:
                return False
            matcher.append_token(token_id, is_end=False)
        return matcher.find_allowed()[1]

    for begin, prompt in (("<think>", ""), ("", "<think>")):
        assert allows(prompt, begin + " one two</think> Hi", 2)
        assert allows(prompt, begin + " one</think> Hi", 2)
        assert not allows(prompt, begin + " one two three</think>", 2)
        assert allows(prompt, begin + "</think>Hi", 0)
        assert not allows(prompt, begin + " one</think>Hi", 0)
        assert allows(prompt, begin + ' one</think>{"a": 1}', 2, FORM)
    assert allows("", "Hi <think> one two three", 2)
    over = AnswerFormat(tokenizer, "<think></think>", None, find_reasoning_parser("qwen3"), 2)
    assert asyncio.run(make_answer_grammar(over, None, None, CHECKS)) == ""
