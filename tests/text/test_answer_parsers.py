"""Answers in every format, cut into pieces at every place."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.text import harmony
from shardline.text.answer_parser import AnswerParser
from shardline.text.reasoning_parsers import find_reasoning_parser, guess_reasoning_parser, reasoning_parser_names
from shardline.text.tool_parsers import find_tool_parser, guess_tool_parser, tool_parser_names
from shardline.text.tool_parsers.tagged import ParameterSchemas
from tests.text.answers import FUNCTIONS, NAMES, WRITERS, Answer, gpt_oss, hermes, join, parse, seed_oss

TAGGED = (
    "deepseek_v32", "deepseek_v41", "dots", "glm4_moe", "hy_v3", "hy_v4", "k2_horizon", "kimi_k3", "mimo", "minicpm5",
    "minimax_m2", "minimax_m3", "muse_glimmer", "qwen3_coder", "seed_oss", "step3",
)  # fmt: skip
LITERAL = ("functiongemma", "gemma4", "lfm2", "llama4_pythonic", "olmo3", "pythonic")
WHOLE = ("llama3_json", "llama4_pythonic", "pythonic", "xlam")
"""Formats in which calls are the whole answer, and have no marks."""
FORMS = [(name, writer) for name, writers in WRITERS.items() for writer in writers]
in_every_form = pytest.mark.parametrize(("name", "write"), FORMS, ids=[writer.__name__ for _, writer in FORMS])

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
texts = st.text(st.sampled_from('ab <>/="\\\n') | st.characters(codec="utf-8"), max_size=8)
typed_arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": texts,
        "count": st.integers(),
        "share": st.floats(-1e6, 1e6),
        "on": st.booleans(),
        "list": st.lists(json_values, max_size=2),
        "thing": st.dictionaries(texts, json_values, max_size=2),
        "maybe": st.none() | texts.filter(lambda text: text.strip() != "null"),
        "any": st.integers() | st.sampled_from(["", "a b", "<b>", "1 2", '"q"']),
    },
)


def call_lists(name: str) -> st.SearchStrategy[list[tuple[str, str]]]:
    """Calls that a format can spell."""
    values = (
        typed_arguments if name in TAGGED + LITERAL else st.dictionaries(st.text(max_size=6), json_values, max_size=3)
    )
    arguments = values.map(lambda value: json.dumps(value, ensure_ascii=False))
    return st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3)


def test_every_format_is_tested() -> None:
    assert set(WRITERS) == set(tool_parser_names())


@pytest.mark.slow
@in_every_form
@settings(deadline=None, max_examples=5)
@given(data=st.data())
def test_calls_are_read(name: str, write, data: st.DataObject) -> None:
    calls = data.draw(call_lists(name))
    text = write(calls)
    assert parse(text, name, most_places=40) == Answer(calls=calls)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [('<|tool_call>call:f{a:[<|"|>x<|"|>', '{"a": ["x"'), ('<|tool_call>call:f{a:1,<|"|', '{"a": 1')],
)
def test_what_is_cut_within_values_of_gemma_adds_nothing(text: str, arguments: str) -> None:
    assert parse(text, "gemma4", cut=True) == Answer(calls=[("f", arguments)])


@pytest.mark.slow
@in_every_form
@settings(deadline=None, max_examples=5)
@given(data=st.data(), cut=st.integers(0, 200))
def test_a_cut_answer_is_a_part_of_the_whole(name: str, write, data: st.DataObject, cut: int) -> None:
    calls = data.draw(call_lists(name))
    text = write(calls)[:cut]
    answer = parse(text, name, cut=True, most_places=40)
    for (called, given_arguments), (expected, whole) in zip(answer.calls, calls, strict=False):
        assert called == expected
        assert whole.startswith(given_arguments)
    # Without marks, the beginning of a call looks like any text.
    assert name in WHOLE or answer.content == ""


@pytest.mark.slow
@in_every_form
@settings(deadline=None, max_examples=10)
@given(text=st.text(st.sampled_from('ab <>{}[]"\\:,;|`\n') | st.characters(codec="utf-8"), max_size=40))
def test_any_text_is_the_same_in_any_pieces(name: str, write, text: str) -> None:
    parse(text, name)
    parse(write([("f", "{}")])[: len(text)] + text, name)


@in_every_form
@pytest.mark.parametrize("text", ["", " ", "Hello", " Hello, world \n", "a < b", "1 [2] {3}", "<tool", "[TOOL"])
def test_an_answer_without_calls_stays_as_it_is(name: str, write, text: str) -> None:
    assert parse(text, name) == Answer(content=text)


@in_every_form
def test_only_the_first_call_is_reported_without_parallel_calls(name: str, write) -> None:
    calls = [("f", '{"count": 1}'), ("weather", "{}")]
    assert parse(write(calls), name, parallel=False).calls == calls[:1]


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in WHOLE])
def test_content_stands_before_calls(name: str) -> None:
    write = WRITERS[name][0]
    assert parse("Let me look.\n\n" + write([("f", "{}")]), name) == Answer(content="Let me look.", calls=[("f", "{}")])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', [("f", "{}")]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"arguments": null, "name": "f"}</tool_call>', [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", '{"a": 1}')]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>}"}}</tool_call>',
            [("f", '{"a": "</tool_call>}"}')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": {}}}\n<tool_call>{"name": "f"}',
            [("f", '{"a": {}}'), ("f", "{}")],
        ),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', [("f", "{}")]),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {"x": "}"}}', [("f", '{"x": "}"}')]),
        ("llama3_json", '{"name": "f", "arguments": {}}', [("f", "{}")]),
        ("mistral", '[TOOL_CALLS] [{"arguments": {"a": 1}, "name": "f"}]', [("f", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS]f{"a": 1}', [("f", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', [("f", '{"a": 1}')]),
        (
            "gpt_oss",
            '<|channel|>analysis to=functions.f<|message|>{"a": "<|"}<|end|><|start|>assistant to=functions.f'
            "<|message|>",
            [("f", '{"a": "<|"}'), ("f", "")],
        ),
        (
            "glm4_moe",
            "<tool_call> f\n<arg_key>on</arg_key><arg_value>True</arg_value><arg_key>x</arg_key>\n<arg_value> [1, 2]\n"
            "</arg_value></tool_call>",
            [("f", '{"on": true, "x": [1, 2]}')],
        ),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"></minimax:tool_call>', [("f", "{}")]),
        ("granite", '<tool_call> [{"name": "f", "arguments": {"a": [1]}},\n {"name": "weather"}]', [
            ("f", '{"a": [1]}'), ("weather", "{}"),
        ]),
        ("internlm", '<|action_start|><|plugin|>{"name": "f", "parameters": {}}<|action_end|>', [("f", "{}")]),
        ("phi4_mini_json", 'functools[\n  {"name": "f", "arguments": {"a": 1}}\n]', [("f", '{"a": 1}')]),
        (
            "pythonic",
            "[f(a='it\\'s', b=\"\\\"x\\\"\", c={'d': None, 'e': [True, (1, 2.5)]}), g.h()]",
            [("f", '{"a": "it\'s", "b": "\\"x\\"", "c": {"d": null, "e": [true, [1, 2.5]]}}'), ("g.h", "{}")],
        ),
        (
            "pythonic",
            r"[f(a='\x41\u00e9\ud83d\ude00\U0001F600\ud83d', b=07, c=null, d={1: 'x'})]",
            [("f", '{"a": "Aé\U0001f600\U0001f600\ufffd", "b": "07", "c": null, "d": {"1": "x"}}')],
        ),
        (
            "gemma4",
            '<|tool_call>call:f{a:<|"|>{x}, "y"<|"|>, b:[1,true,{c:none}],<|"|>d<|"|>:{}}<tool_call|>',
            [("f", '{"a": "{x}, \\"y\\"", "b": [1, true, {"c": "none"}], "d": {}}')],
        ),
        ("olmo3", "<function_calls>\nf(on=true)\nweather()\n</function_calls>", [
            ("f", '{"on": true}'), ("weather", "{}"),
        ]),
        (
            "qwen3_coder",
            "<function=f>\n<parameter=text>a\n\n</parameter><parameter=count>many</parameter></function></tool_call>",
            [("f", '{"text": "a\\n", "count": "many"}')],
        ),
        (
            "deepseek_v32",
            '<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="any" string="true">5'
            "</｜DSML｜parameter>"
            '<｜DSML｜parameter name="count">5</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>',
            [("f", '{"any": "5", "count": 5}')],
        ),
        (
            "minicpm5",
            '<function name="f"><param name="text"><![CDATA[</param>]]></param></function><function name="weather">',
            [("f", '{"text": "</param>"}'), ("weather", "")],
        ),
        (
            "minimax_m3",
            ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">\n]<]minimax[>[<list>]<]minimax[>[<item>'
            "]<]minimax[>[<a>1]<]minimax[>[</a>]<]minimax[>[</item>]<]minimax[>[<item>x]<]minimax[>[</item>]<]minimax[>[</list>\n"
            "]<]minimax[>[<thing>]<]minimax[>[<b>1]<]minimax[>[</b>]<]minimax[>[<b>2]<]minimax[>[</b>"
            "]<]minimax[>[</thing>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>",
            [("f", '{"list": [{"a": 1}, "x"], "thing": {"b": [1, 2]}}')],
        ),
        (
            "kimi_k3",
            '<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
            '<|open|>argument key="a&quot;b" type="number"<|sep|>1.5<|close|>argument<|sep|><|close|>call<|sep|>'
            "<|close|>tools<|sep|><|close|>message<|sep|>",
            [("f", '{"a\\"b": 1.5}')],
        ),
        (
            "k2_horizon",
            "<ifm|tool_calls><ifm|tool_call>f<ifm|arg_key>text</ifm|arg_key><ifm|arg_type>string</ifm|arg_type>"
            "<ifm|arg_value>a</ifm|arg_value></ifm|tool_call></ifm|tool_calls>",
            [("f", '{"text": "a"}')],
        ),
        (
            "muse_glimmer",
            '<atem:function_calls><atem:invoke name="f.f"></atem:invoke></atem:function_calls>',
            [("f", "{}")],
        ),
        ("xlam", '```json\n[{"name": "f", "arguments": {"a": 1}}]\n```', [("f", '{"a": 1}')]),
        ("xlam", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', [("f", '{"a": 1}')]),
        ("xlam", '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', [("f", "{}")]),
        ("gigachat3", '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": {}}', [("f", "{}")]),
        (
            "qwen3_coder",
            "<tool_call><function=g><parameter=a>1</parameter><parameter=b>NaN</parameter></function></tool_call>",
            [("g", '{"a": 1, "b": "NaN"}')],
        ),
    ],
)  # fmt: skip
def test_variants(name: str, text: str, expected: list[tuple[str, str]]) -> None:
    assert parse(text, name) == Answer(calls=expected)


@pytest.mark.parametrize(
    "text", ['{"name": "unknown", "parameters": {}}', '{"a": 1}', '{"name": "f', "{", '{"name": 3}', ' {"x": "é"} \n']
)
def test_llama_json_that_is_no_call_is_content(text: str) -> None:
    assert parse(text, "llama3_json") == Answer(content=text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "a <tool_call>no json</tool_call> b"),
        ("hermes", '<tool_call>{"nam": 1}</tool_call>'),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>x<|tool_call_end|><|tool_calls_section_end|>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>x<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
        ("gpt_oss", "<|channel|>final<|message|>a<|end|>"),
        ("glm4_moe", "a <tool_call>no call</tool_call> b"),
        ("minimax_m2", "a <minimax:tool_call>no call</minimax:tool_call>"),
        ("qwen3_coder", "<tool_call>no call</tool_call>"),
        ("seed_oss", "<seed:tool_call>no call</seed:tool_call>"),
        ("granite", "<|tool_call|>no call"),
        ("jamba", "<tool_calls>no call</tool_calls>"),
        ("olmo3", "<function_calls>no call</function_calls>"),
        ("lfm2", "<|tool_call_start|>no call<|tool_call_end|>"),
        ("gemma4", "<|tool_call>no call<tool_call|>"),
        ("functiongemma", "<start_function_call>no call<end_function_call>"),
        ("dots", "a <dots_function_call>no call</dots_function_call>"),
        ("apertus", "<|tools_prefix|>no call<|tools_suffix|>"),
        ("cohere_command3", "<|START_ACTION|>no call<|END_ACTION|>"),
        ("hy_v4", "<tool_calls><tool_call>no call</tool_call></tool_calls>"),
        ("minicpm5", '<function name="no call">x</function>'),
    ],
)
def test_no_markup_reaches_content(name: str, text: str) -> None:
    answer = parse(text, name)
    assert answer.calls == []
    assert not any(marker in answer.content for marker in find_tool_parser(name).markers)
    assert answer.content


@pytest.mark.slow
@pytest.mark.parametrize("name", reasoning_parser_names())
@settings(deadline=None, max_examples=10)
@given(
    reasoning=st.text(st.sampled_from("ab <>/thinkTHINK[]\n"), max_size=20),
    content=st.text(st.sampled_from("ab <>[]\n"), max_size=20),
)
def test_reasoning_is_split_off(name: str, reasoning: str, content: str) -> None:
    parser = find_reasoning_parser(name)
    if name == "minimax_m2_append_think":
        assert parse(content, reasoning=name) == Answer(content=f"<think>{content}")
        return
    expected = Answer(reasoning.strip(), content.lstrip())
    if parser.end not in reasoning and not reasoning.strip().startswith(parser.begin):
        marked = f"{parser.begin}{reasoning}{parser.end}{content}"
        assert parse(marked, reasoning=name) == expected
        assert (
            parse(marked.removeprefix(parser.begin), reasoning=name, prompt=f"<|assistant|>{parser.begin}\n")
            == expected
        )
    closed = f"{parser.begin}\n\n{parser.end}\n\n"
    assert parse(content, reasoning=name, prompt=closed) == Answer(content=content)


def test_reasoning_without_marks() -> None:
    assert parse("think</think>\n\nso", reasoning="deepseek_r1") == Answer("think", "so")
    assert parse("no marks", reasoning="deepseek_r1") == Answer("no marks")
    assert parse(" no marks ", reasoning="qwen3") == Answer(content=" no marks ")
    for name in ("qwen3", "glm45", "kimi_k2", "deepseek_v3"):
        free = find_reasoning_parser(name)("<|assistant|>", is_free=True)
        expected = ("", "no marks") if name == "deepseek_v3" else ("no marks", "")
        assert tuple(map("".join, zip(free.add_text("no marks"), free.end_text(), strict=True))) == expected
        over = find_reasoning_parser(name)("<think></think>", is_free=True)
        assert over.add_text("no marks") == ("", "no marks")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("ernie45", "abc\n</think>\n\n<response>\ndef\n</response>\n", Answer("abc", "def")),
        ("ernie45", "abc\n</think>\ndef \n", Answer("abc", "def \n")),
        ("hunyuan_a13b", "<think>\na\n</think>\n<answer>\nb\n\nc\n</answer>", Answer("a", "b\n\nc")),
        ("hunyuan_a13b", "<think>\n\n</think>\n<answer>\nb", Answer("", "b")),
        ("hunyuan_a13b", "<answer>b</answer> c", Answer("", "bc")),
        ("hunyuan_a13b", " <ans", Answer("", " <ans")),
        ("granite_thinking_parser", "<think>a</think> <response>b </response>", Answer("a", "b")),
        ("granite", "Here is my thought process: a Here's my response: b", Answer("a", "b")),
        ("granite", "Here's my thought process:a\nHere is my response:b", Answer("a", "b")),
        ("granite", "Here is my answer", Answer("", "Here is my answer")),
        ("gemma4", "<|channel>thought\na\n<channel|>b", Answer("a", "b")),
        ("k2_horizon", "<ifm|think_fast>a</ifm|think_fast>b", Answer("a", "b")),
        (
            "cohere_command3",
            "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>",
            Answer("a", "b"),
        ),
        ("cohere_command4", "<|START_TEXT|>b<|END_TEXT|>", Answer("", "b")),
        (
            "kimi_k3",
            "<|open|>think<|sep|>a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|><|close|>message"
            "<|sep|>",
            Answer("a", "b"),
        ),
        ("kimi_k3", "b<|close|>response<|sep|>", Answer("", "b")),
        (
            "inkling",
            "<|message_model|><|content_thinking|>a<|end_message|><|message_model|><|content_text|>b<|end_message|>"
            "<|content_model_end_sampling|>",
            Answer("a", "b"),
        ),
        (
            "muse_glimmer",
            " to=self<|message|>a<|eom|><|start|>assistant to=user<|message|>b<|eot|>",
            Answer("a", "b"),
        ),
    ],
)
def test_reasoning_in_other_marks(name: str, text: str, expected: Answer) -> None:
    assert parse(text, reasoning=name) == expected


def test_calls_behind_reasoning_in_messages() -> None:
    calls = [("f", '{"text": "a"}')]
    thoughts = "<|message_model|><|content_thinking|>a<|end_message|><|message_model|>f"
    assert parse(thoughts + WRITERS["inkling"][0](calls), "inkling", "inkling") == Answer("a", "", calls)
    header = " to=self<|message|>a<|eom|><|start|>assistant to=f.f<|message|>"
    call = WRITERS["muse_glimmer"][0](calls) + "<|eom|>"
    assert parse(header + call, "muse_glimmer", "muse_glimmer") == Answer("a", "", calls)
    answer = "<|open|>think<|sep|>a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|>"
    assert parse(answer + WRITERS["kimi_k3"][0](calls), "kimi_k3", "kimi_k3") == Answer("a", "b", calls)


def test_code_that_is_no_list_of_calls_stays() -> None:
    for text in ('```python\nprint("[")\n```', "```json\n[1, 2]\n```", '[{"a": 1}]', "[[1]]", "<tool_call>a"):
        assert parse(text, "xlam") == Answer(content=text)


HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
)


def test_messages_of_gpt_oss() -> None:
    call = gpt_oss([("f", '{"a": "<|channel|>"}')])
    body = '{"a": "b"}'
    final = "<|channel|>final <|constrain|>json<|message|>Done.<|return|>"
    assert parse(HARMONY + call, "gpt_oss", "gpt_oss") == Answer("Hm.\nSo.", "I look.", [("f", '{"a": "<|channel|>"}')])
    assert parse(HARMONY + final, "gpt_oss", "gpt_oss") == Answer("Hm.\nSo.", "I look.\nDone.")
    assert parse(HARMONY + final, None, "gpt_oss") == Answer("Hm.\nSo.", "I look.\nDone.")
    assert parse(HARMONY + gpt_oss([("f", body)]), None, "gpt_oss") == Answer("Hm.\nSo.", "I look." + body)
    python = "<|channel|>analysis to=python code<|message|>1 + 1<|call|>"
    assert parse(python, "gpt_oss", "gpt_oss") == Answer("1 + 1")
    assert parse("one", None, "gpt_oss", "<|start|>assistant<|channel|>final<|message|>Count: ") == Answer(
        content="one"
    )


@settings(deadline=None, max_examples=60)
@given(
    text=st.lists(st.sampled_from([*harmony.MARKERS, "assistant", " to=functions.f", "analysis", "final", "{}", " a"]))
)
def test_no_marks_of_gpt_oss_reach_anything(text: list[str]) -> None:
    for tools in ("gpt_oss", None):
        answer = parse("".join(text), tools, "gpt_oss", most_places=30)
        assert not any(mark in answer.content + answer.reasoning for mark in harmony.MARKERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(WRITERS))
def test_reasoning_before_calls(name: str) -> None:
    calls = [("f", '{"text": "<think>"}')]
    text = "<think>I shall call <tool_call>.</think>\n" + WRITERS[name][0](calls)
    assert parse(text, name, "deepseek_r1") == Answer("I shall call <tool_call>.", "", calls)


@pytest.mark.slow
@in_every_form
def test_the_mark_of_a_call_ends_reasoning(name: str, write) -> None:
    calls = [("f", '{"text": "a"}')]
    thoughts = "I look. " + write(calls)
    ended = Answer("I look.", "", calls)
    assert parse("<think>" + thoughts, name, "qwen3") == (
        ended if find_tool_parser(name).call_marks() else Answer(thoughts.strip())
    )
    assert parse("<think>" + thoughts, reasoning="qwen3") == Answer(thoughts.strip())
    assert parse("<think>" + thoughts, name, "deepseek_r1") == Answer(thoughts.strip())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reasoning", "tools"),
    [
        ("gemma4", "gemma4"),
        ("glm47", "glm47"),
        ("kimi_k2", "kimi_k2"),
        ("minimax_m2", "minimax_m2"),
        ("mistral", "mistral"),
        ("plamo3", "plamo3"),
        ("seed_oss", "seed_oss"),
        ("deepseek_v4", "deepseek_v4"),
    ],
)
def test_reasoning_that_a_call_ends_has_its_own_marks(reasoning: str, tools: str) -> None:
    calls = [("f", '{"text": "a"}'), ("weather", '{"text": "b"}')]
    writers = [write for name, write in FORMS if find_tool_parser(name) is find_tool_parser(tools)]
    begin = find_reasoning_parser(reasoning).begin
    for write in writers:
        assert parse(f"{begin}I look.\n{write(calls)}", tools, reasoning) == Answer("I look.", "", calls)
        assert parse(f"I look.{write(calls)}", tools, reasoning, prompt=begin + "\n") == Answer("I look.", "", calls)


def test_formats_are_guessed_from_templates() -> None:
    templates = {
        "hermes": "...<tool_call>\n{...}\n</tool_call>...",
        "mistral": "{{- '[TOOL_CALLS]' }}",
        "deepseek_v3": "{{'<｜tool▁calls▁begin｜>'}}",
        "kimi_k2": "{{'<|tool_calls_section_begin|>'}}",
        "gpt_oss": '{{- "<|channel|>commentary" }} {{- "<|call|>" }}',
        "glm4_moe": "<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
        "minimax_m2": "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}",
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
        "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=x>1</parameter>\n</function>\n</seed:tool_call>",
        "llama3_json": '{{- "Environment: ipython\n" }} {"name": f, "parameters": d}',
    }
    for name, template in templates.items():
        assert guess_tool_parser(template.replace("f, ", 'f, "parameters": ')) == name
        assert guess_reasoning_parser(template) == ("gpt_oss" if name == "gpt_oss" else None)
    assert guess_tool_parser("{% for m in messages %}{{ m.content }}") is None


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "5", '"5"'),
        ({"type": ["string", "integer"]}, "5", "5"),
        ({"type": ["string", "integer"]}, "5.5", '"5.5"'),
        ({"type": "number"}, "5", "5"),
        ({"type": "boolean"}, "False", "false"),
        ({"type": ["integer", "null"]}, "None", "null"),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"allOf": [{"$ref": "#/$defs/a"}]}, "null", '"null"'),
        ({"$ref": "#/$defs/loop"}, "1", "1"),
        ({"type": "array"}, "[1,", '"[1,"'),
        ({"type": "array"}, "[" * 100_000, json.dumps("[" * 100_000)),
        ({"oneOf": "no list"}, "x", '"x"'),
        (3, "{}", "{}"),
    ],
)  # fmt: skip
def test_texts_become_values_of_their_schemas(schema: Any, text: str, expected: str) -> None:
    definitions = {"a": {"const": "b"}, "loop": {"$ref": "#/$defs/loop"}}
    assert ParameterSchemas({"properties": {"x": schema}, "$defs": definitions}).to_json("x", text) == expected


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"hermes.*of the same formats.*deepseek_v31"):
        find_tool_parser("base")
    with pytest.raises(ValueError, match="qwen3"):
        find_reasoning_parser("o1")


def test_names_of_vllm() -> None:
    for name, other in (
        ("openai", "gpt_oss"),
        ("glm45", "glm4_moe"),
        ("qwen3_xml", "qwen3_coder"),
        ("granite4", "hermes"),
        ("deepseek_v4", "deepseek_v32"),
        ("cohere_command4", "cohere_command3"),
    ):
        assert find_tool_parser(name) is find_tool_parser(other)
    for name, other in (("openai_gptoss", "gpt_oss"), ("glm45", "glm4_moe"), ("olmo3", "deepseek_r1")):
        assert find_reasoning_parser(name) is find_reasoning_parser(other)
    names = [name for known in tool_parser_names() for name in (known, *find_tool_parser(known).other_names)]
    assert len(set(names)) == len(names)
    names = [name for known in reasoning_parser_names() for name in (known, *find_reasoning_parser(known).other_names)]
    assert len(set(names)) == len(names)


def test_line_breaks_of_values_are_kept_if_the_format_adds_none() -> None:
    for value in ("\n", "\na\n"):
        calls = [("weather", json.dumps({"text": value}))]
        assert parse(seed_oss(calls), "seed_oss").calls == calls


@pytest.mark.slow
def test_a_whole_answer_is_parsed_in_time_in_proportion_to_its_length() -> None:
    """In quadratic time, each of these would take minutes."""
    long = json.dumps(json.dumps({"text": '"' * 500_000}))
    parser = AnswerParser(None, find_tool_parser("hermes")(FUNCTIONS))
    began = time.process_time()
    assert join(parser, [hermes([("f", long)])]).calls == [("f", json.loads(long))]
    parser = AnswerParser(None, find_tool_parser("hermes")(FUNCTIONS))
    assert len(join(parser, [hermes([("f", '{"count": 1}')] * 10_000)]).calls) == 10_000
    assert time.process_time() - began < 10


def test_formats_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "hermes" in tool_parser_names()
    monkeypatch.setattr("pkgutil.iter_modules", lambda *paths: pytest.fail("a folder is read for an answer"))
    assert find_tool_parser("hermes")
    assert "hermes" in tool_parser_names()
