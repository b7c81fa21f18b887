"""The grammar of whole answers: reasoning, then calls or the form that was asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from shardline.checkpoints.hub import DEMO_FOLDER
from shardline.server.errors import ApiError
from shardline.server.openai.answer_form import ResponseFormat
from shardline.server.openai.answer_format import AnswerFormat
from shardline.server.openai.answer_grammar import make_answer_grammar
from shardline.server.openai.chat.tools import FunctionDefinition, ToolUse
from shardline.structured.checks import GrammarChecks
from shardline.structured.compiler import GrammarCompiler
from shardline.text.reasoning_parsers import find_reasoning_parser
from shardline.text.tokenizer import Tokenizer
from shardline.text.tool_parsers import find_tool_parser, tool_parser_names
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


def test_a_line_break_behind_a_required_call_begins_no_other() -> None:
    made = grammar(use_tools(True))
    for text in (CALL, CALL + "\n", f"{CALL}\n{CALL}\n"):
        assert accepts(COMPILER, made, text), text
    for text in (CALL + "\n\n", CALL + "\nx", "\n" + CALL):
        assert not accepts(COMPILER, made, text), text


def test_calls_within_reasoning() -> None:
    for begin, prompt in (("<think>", ""), ("", "<think>\n")):
        auto, required = (grammar(use_tools(is_required), "qwen3", prompt) for is_required in (False, True))
        for text in (CALL, f"hm {CALL}", f"hm</think>\n{CALL}"):
            assert accepts(COMPILER, auto, begin + text), text
            assert accepts(COMPILER, required, begin + text), text
        assert accepts(COMPILER, auto, f"{begin}hm {CALL}\n{CALL} Hello")
        assert not accepts(COMPILER, required, begin + "hm")
        for made in (auto, required):
            assert not accepts(COMPILER, made, begin + "hm <tool_call>\n</think>Hello")
    form = grammar(use_tools(False), "qwen3", "<think>\n", FORM)
    assert accepts(COMPILER, form, "hm" + CALL)
    assert not accepts(COMPILER, form, f"hm{CALL} Hello")
    marked = {name: marks for name in tool_parser_names() if (marks := find_tool_parser(name).call_marks())}
    assert {"glm4_moe", "kimi_k2", "gemma4", "deepseek_v32", "minimax_m2", "mistral", "plamo3"} <= marked.keys()
    for name, (mark, *_) in marked.items():
        made = grammar(use_tools(False, {"type": "object", "properties": {}}, name), "qwen3", "<think>\n")
        assert "| lead rest" in made, name
        assert accepts(COMPILER, made, "hm</think>Hello")
        assert not accepts(COMPILER, made, f"hm {mark} no call</think>Hello"), name
    unlike = grammar(use_tools(False), "deepseek_r1", "<think>\n")
    assert accepts(COMPILER, unlike, f"hm {CALL}</think>Hello")


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


@pytest.mark.parametrize(
    ("name", "call", "is_special"),
    [
        ("hermes", CALL, False),
        ("hermes", CALL, True),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
            '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
            True,
        ),
    ],
)
def test_marks_within_reasoning_may_be_tokens(name: str, call: str, is_special: bool) -> None:
    backend = tokenizers.Tokenizer.from_file(str(Path(DEMO_FOLDER) / "tokenizer.json"))
    marks = ("<think>", "</think>", *find_tool_parser(name).markers)
    backend.add_tokens([tokenizers.AddedToken(mark, special=is_special) for mark in marks])
    compiler = GrammarCompiler(backend)
    for is_required in (False, True):
        for begin, prompt in (("<think>", ""), ("", "<think>")):
            answer = AnswerFormat(
                Tokenizer(backend), prompt, use_tools(is_required, parser=name), find_reasoning_parser("qwen3")
            )
            made = asyncio.run(make_answer_grammar(answer, None, None, CHECKS))
            for text in (call, f"hm {call}", f"hm</think>\n{call}"):
                assert allows(compiler, backend, made, begin + text), text
            assert allows(compiler, backend, made, f"{begin}hm</think>Hello") is not is_required
            assert not allows(compiler, backend, made, f"{begin}hm {marks[2]}</think>Hello")
            if prompt:
                assert not allows(compiler, backend, made, "hm"), "reasoning does not end by itself"


def allows(compiler: GrammarCompiler, backend: tokenizers.Tokenizer, made: str, text: str) -> bool:
    """Whether a grammar takes the tokens of a text, and may end behind them."""
    matcher = compiler.start_grammar(made)
    for token_id in backend.encode(text, add_special_tokens=False).ids:
        words, _ = matcher.find_allowed()
        if not words[token_id >> 5] >> (token_id & 31) & 1:
            return False
        matcher.append_token(token_id, is_end=False)
    return matcher.find_allowed()[1]


def test_reasoning_may_have_a_budget() -> None:
    backend = tokenizers.Tokenizer.from_file(str(Path(DEMO_FOLDER) / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken(mark, special=False) for mark in ("<think>", "</think>")])
    tokenizer, compiler = Tokenizer(backend), GrammarCompiler(backend)

    def takes(
        prompt: str, text: str, budget: int, form: ResponseFormat | None = None, tools: ToolUse | None = None
    ) -> bool:
        parser = find_reasoning_parser("qwen3")
        answer = AnswerFormat(tokenizer, prompt, tools, parser, budget)
        return allows(compiler, backend, asyncio.run(make_answer_grammar(answer, form, None, CHECKS)), text)

    for begin, prompt in (("<think>", ""), ("", "<think>")):
        assert takes(prompt, begin + " one two</think> Hi", 2)
        assert takes(prompt, begin + " one</think> Hi", 2)
        assert not takes(prompt, begin + " one two three</think>", 2)
        assert takes(prompt, begin + "</think>Hi", 0)
        assert not takes(prompt, begin + " one</think>Hi", 0)
        assert takes(prompt, begin + ' one</think>{"a": 1}', 2, FORM)
        assert takes(prompt, f"{begin} one</think>{CALL}", 20, tools=use_tools(False))
    assert not takes("<think>", f" one{CALL}</think>Hi", 200, tools=use_tools(False)), "the call would be free"
    assert takes("", "Hi <think> one two three", 2)
    over = AnswerFormat(tokenizer, "<think></think>", None, find_reasoning_parser("qwen3"), 2)
    assert asyncio.run(make_answer_grammar(over, None, None, CHECKS)) == ""
