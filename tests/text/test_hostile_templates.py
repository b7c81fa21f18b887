"""A template that would run for ever or fill the memory is ended in its own process, whatever it uses for that."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import pytest

from shardline.text import chat_template, template_sandbox
from shardline.text.chat_template import ChatTemplate, Conversation, render_and_encode_async
from tests.text import builders
from tests.text.builders import render

pytestmark = pytest.mark.slow  # templates run in processes

CHAT = [{"role": "user", "content": "Hi"}]
DOUBLING = "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
LISTS = "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"
LOOP = "{% for i in range(99999) %}"

SLOW = {
    "loops": LOOP * 4 + "{% endfor %}" * 4,
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}
LARGE = {
    "doubling": DOUBLING,
    "lists": LISTS,
    "percent": "{{ '%3000000000d' % 1 }}",
    "ljust": "{{ 'x'.ljust(3000000000) }}",
    "center": "{{ 'x' | center(3000000000) }}",
    "format": "{{ '{:3000000000}'.format(1) }}",
    "filter": "{{ '%3000000000d' | format(1) }}",
    "indent": "{{ ('a\\n' * 9000) | indent(900000) }}",
    "join": "{{ range(99999) | join('x' * 90000) }}",
    "replace": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "hidden": "{% set x = 'x'.center(3000000000) %}",
}
EITHER = {
    "wordwrap": "{{ ('a ' * 8000000) | wordwrap(1) }}",
    "lipsum": "{{ lipsum(n=99999, max=99999) }}",
    "batch": "{{ range(99999) | batch(3000000000, 1) | list }}",
    "slice": "{{ range(9) | slice(3000000000) | list }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


@pytest.fixture(scope="module", autouse=True)
def _short() -> Iterator[None]:
    """These limits are as good for tests as the real ones, and shorter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template, "MAX_RENDER_SECONDS", 0.5)
        yield


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        *(pytest.param(source, "took more than 0.5 s", id=name) for name, source in SLOW.items()),
        *(pytest.param(source, "256 MiB|16000000 characters", id=name) for name, source in LARGE.items()),
        *(pytest.param(source, "the chat template", id=name) for name, source in EITHER.items()),
    ],
)
def test_the_refusal_names_the_limit(source: str, limit: str) -> None:
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1])
    template = ChatTemplate(source)
    with pytest.raises(ValueError, match=limit):
        render(template, CHAT)
    with open("/proc/self/statm") as file:
        assert (int(file.read().split()[1]) - before) * os.sysconf("SC_PAGE_SIZE") < 80 << 20
    template.close()


@pytest.mark.parametrize("part", ["'%300000000d' % 1", "'x' * 9000000 * 9000000", "range(99999) | join('x' * 90000)"])
def test_constants_are_not_computed_before_the_template_runs(part: str) -> None:
    for source in ("{{ %s }}", "{%% if %s %%}{%% endif %%}", "{%% set x = %s %%}"):
        template = ChatTemplate("{% if messages[0].content == 'bad' %}" + source % part + "{% endif %}fine")
        assert render(template, CHAT) == "fine"
        template.close()


def test_a_template_that_cannot_be_compiled_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_COMPILE_SECONDS", 0.2)
    with pytest.raises(ValueError, match=r"chat template \(default\) cannot be compiled: it took more than 0.2 s"):
        ChatTemplate("".join(f"{{% if x == {i} %}}{{{{ y.a{i} }}}}{{% endif %}}" for i in range(100_000)))
    with pytest.raises(ValueError, match=r"chat template \(tool_use\) is broken"):
        ChatTemplate({"default": "x", "tool_use": "{% for %}"})
    with pytest.raises(ValueError, match=r"chat template \(default\) is broken"):
        ChatTemplate("{{ " + "(" * 50_000 + ")" * 50_000 + " }}")


def test_chats_do_not_wait_for_hostile_ones() -> None:
    tokenizer = builders.tokenizer(builders.byte_level_json())
    template = ChatTemplate("{% if messages[0].content == 'bad' %}" + SLOW["loops"] + "{% endif %}fine")

    async def answer(content: str) -> str:
        chat = Conversation([{"role": "user", "content": content}])
        return (await render_and_encode_async(template, tokenizer, chat))[0]

    async def main() -> None:
        bad = [asyncio.create_task(answer("bad")) for _ in range(8)]
        await asyncio.sleep(0.2)
        started = time.monotonic()
        assert await answer("good") == "fine"
        assert time.monotonic() - started < 2.0
        assert all(isinstance(error, ValueError) for error in await asyncio.gather(*bad, return_exceptions=True))

    asyncio.run(main())
    template.close()


def test_numbers_and_names_reach_the_template_as_they_are() -> None:
    template = ChatTemplate("{{ x | tojson }} {{ y }} {{ messages[0].tool_calls[0].function.arguments | tojson }}")
    call = {"function": {"name": "f", "arguments": '{"b": 1e3, "a": 100000000000000000000000000000000, "c": 1.10}'}}
    chat = [{"role": "assistant", "tool_calls": [call]}]
    text = render(template, chat, x={"ü": [10**30, 1.5, -0.0, None, True]}, y=2**70)
    assert text == (
        '{"ü": [1000000000000000000000000000000, 1.5, -0.0, null, true]} 1180591620717411303424 '
        '{"b": 1000.0, "a": 100000000000000000000000000000000, "c": 1.1}'
    )
    with pytest.raises(ValueError, match="must be JSON"):
        render(template, CHAT, x=object())
    template.close()
