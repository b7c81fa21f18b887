"""Chat templates in the sandbox, compared with transformers' apply_chat_template."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from shardline.text import chat_template
from shardline.text.chat_messages import normalize_messages
from shardline.text.chat_template import ChatTemplate, Conversation, render_and_encode
from tests.text import builders
from tests.text.builders import render

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {% if loop.index > 9 %}{% break %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {% generation %}{{ message['content'] | trim }}{% endgeneration %}
    {% for call in message.tool_calls or [] %}
    {{ call.function.arguments | tojson(indent=2) }}
    {% endfor %}
    {{- '<|im_end|>' }}
{% endfor %}
{% set ns = namespace(found=false) %}
{%- for m in messages %}{% if m.role == 'system' %}{% set ns.found = true %}{% endif %}{% endfor %}
{%- if not ns.found %}no system{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "description": "<b> & 'ü'", "parameters": {"type": "object"}}}
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <there> & 'you' 🙂"}],
    [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "  Why?\n"}],
    [
        {"role": "user", "content": "call"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "2"},
    ],
]


def test_a_rendered_prompt_is_encoded_as_a_whole() -> None:
    tokenizer = builders.tokenizer(builders.byte_level_json())
    template = ChatTemplate(CHATML, tokenizer.special_tokens)
    options: dict[str, Any] = {"tools": TOOLS, "add_generation_prompt": False}
    for chat in CHATS:
        given = Conversation(chat, variables={"enable_thinking": False}, **options)
        text, ids = render_and_encode(template, tokenizer, given)
        assert text == render(template, chat, enable_thinking=False, **options)
        assert ids == tokenizer.encode_text(text, add_special_tokens=False)


@pytest.mark.parametrize("source", [CHATML, builders.TEMPLATE], ids=["chatml", "simple"])
def test_as_in_transformers(tmp_path: Path, source: str) -> None:
    from transformers import AutoTokenizer

    builders.save_folder(tmp_path, builders.byte_level_json(), chat_template=source)
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    template = ChatTemplate.from_folder(tmp_path, {"bos_token": "<|bos|>", "eos_token": "<|eos|>"})
    assert template is not None
    for chat in CHATS:
        for tools in (None, TOOLS):
            for prompt in (True, False):
                expected = oracle.apply_chat_template(
                    chat, tools=tools, add_generation_prompt=prompt, tokenize=False, enable_thinking=prompt
                )
                ours = render(template, chat, tools=tools, add_generation_prompt=prompt, enable_thinking=prompt)
                assert ours == expected


def test_where_templates_are_found(tmp_path: Path) -> None:
    chat = CHATS[0]
    assert ChatTemplate.from_folder(tmp_path) is None

    def rendered(**options: Any) -> str:
        template = ChatTemplate.from_folder(tmp_path)
        assert template is not None
        return render(template, chat, **options)

    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert (rendered(), rendered(tools=TOOLS)) == ("plain", "with tools")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert rendered() == "json"
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools file")
    assert (rendered(), rendered(tools=TOOLS)) == ("file", "tools file")


def test_errors_of_templates_are_value_errors() -> None:
    with pytest.raises(ValueError, match="only user messages"):
        render(ChatTemplate("{{ raise_exception('only user messages') }}"), CHATS[0])
    with pytest.raises(ValueError, match="broken"):
        ChatTemplate("{% for %}")
    for source in (
        "{{ messages[7].content }}",
        "{{ 1 + 'x' }}",
        "{{ messages | tojson(separators=3) }}",
        "{{ 1 / 0 }}",
    ):
        with pytest.raises(ValueError, match="chat template"):
            render(ChatTemplate(source), CHATS[0])
    with pytest.raises(ValueError, match=r"character 3 of the text, '\\udc80', is half of a surrogate pair"):
        render(ChatTemplate("x"), [{"role": "user", "content": "Hi\udc80"}])
    with pytest.raises(ValueError, match="no default chat template, only tool_use"):
        render(ChatTemplate({"tool_use": "x"}), CHATS[0])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set ns = namespace(__html__=1) %}",
        "{% set ns = namespace() %}{% set ns.__call__ = 1 %}",
        "{{ 'x' * 10**9 }}",
        "{{ 9 ** 9999999 }}",
        "{% for i in range(10**8) %}x{% endfor %}",
    ],
)
def test_a_template_cannot_reach_out(source: str) -> None:
    with contextlib.suppress(ValueError):
        assert render(ChatTemplate(source), CHATS[0]) == "", "undefined is as good as refused"


def test_time_and_size_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = ChatTemplate("{% for i in range(9000) %}{% for j in range(9000) %}x{% endfor %}{% endfor %}")
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(ValueError, match="more than 1000 characters"):
        render(loop, CHATS[0])
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 0.0)
    with pytest.raises(ValueError, match="took more than"):
        render(loop, CHATS[0])


def test_strftime_now() -> None:
    assert render(ChatTemplate("{{ strftime_now('%Y') }}"), CHATS[0]).isdigit()


def test_messages_are_brought_into_shape() -> None:
    call: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    normal = normalize_messages(
        [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    )
    assert normal[0]["content"] == "a\nb"
    assert normal[1]["content"] == ""
    assert normal[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert call["function"]["arguments"] == '{"x": 1}', "the caller's messages stay as they are"


@pytest.mark.parametrize("arguments", ["{", "[" * 100_000, '{"x": "\\ud83d"}'])
def test_arguments_that_are_no_json_stay_text(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    [message] = normalize_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"] == [call]
    whole = {"function": {"name": "f", "arguments": '"\\ud83d\\ude42"'}}
    [message] = normalize_messages([{"role": "assistant", "tool_calls": [whole]}])
    assert message["tool_calls"][0]["function"]["arguments"] == "\U0001f642"


@pytest.mark.parametrize("arguments", ["[1" + ",1" * 131_072 + "]", '"' + "a" * (4 << 20) + '"'])
def test_arguments_that_take_long_are_refused(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(ValueError, match="131072 commas"):
        normalize_messages([{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "must not be empty"),
        (["hi"], r"messages\[0\] must be an object with a role"),
        ([{"content": "hi"}], r"messages\[0\] must be an object with a role"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "part of type 'image_url'"),
    ],
)
def test_malformed_messages(messages: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        render(ChatTemplate("x"), messages)


def test_contents_may_be_lists_of_parts() -> None:
    template = ChatTemplate("{% for part in messages[0].content %}[{{ part.type }}:{{ part.text }}]{% endfor %}")
    template.content_as_parts = True
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(template, [{"role": "user", "content": parts}]) == "[text:a\nb]"
    assert render(template, [{"role": "user", "content": "a"}]) == "[text:a]"
    template.close()
