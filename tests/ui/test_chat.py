"""Conversations on the page."""

from __future__ import annotations

import json
import socket

import httpx
from playwright.sync_api import Browser, Page, Route, expect

from tests.e2e.serving import Server
from tests.ui.conftest import begin, open_page, say, serve_demo


def test_an_answer_streams_and_shows_its_probabilities(page: Page) -> None:
    say(page, "What does os.path.join do?")
    answer = page.locator(".message.assistant")
    expect(answer).to_have_count(1)
    assert answer.locator(".text").inner_text().strip()
    expect(answer.locator(".facts")).to_contain_text("24 tokens")
    answer.locator(".token").first.hover()
    expect(page.locator("#tip")).to_be_visible()
    assert page.locator("#tip div").count() >= 5
    expect(page.locator("#tip .chosen")).to_have_count(1)
    page.mouse.move(0, 0)
    expect(page.locator("#tip")).to_be_hidden()
    page.locator("#messages").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_be_visible()


def test_an_answer_is_made_again_and_conversations_are_kept(page: Page) -> None:
    say(page, "First of all")
    page.locator(".again").click()
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".message.assistant")).to_have_count(1)
    page.keyboard.press("Alt+n")
    expect(page.locator(".message")).to_have_count(0)
    say(page, "Another one")
    expect(page.locator("#conversations li")).to_have_count(2)
    page.reload()
    expect(page.locator("#conversations li")).to_have_count(2)
    expect(page.locator(".message.user")).to_contain_text("Another one")
    expect(page.locator(".message.assistant .token").first).to_be_attached()
    page.locator("#conversations .forget").first.click()
    expect(page.locator("#conversations li")).to_have_count(1)
    expect(page.locator(".message.user")).to_contain_text("First of all")


def test_stop_frees_the_blocks(page: Page, server: Server) -> None:
    page.evaluate("document.querySelector('#params [name=logprobs]').checked = false")
    page.route("**/v1/chat/completions", _ignoring_eos)
    begin(page, "A long story", tokens=1500)
    expect(page.locator(".message.assistant .text")).not_to_be_empty()
    assert server.metric("kv_blocks_used") > 0
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".message.assistant .facts")).to_contain_text("stopped")
    server.wait_until(lambda: server.metric("kv_blocks_used") == 0, "blocks are free")


def _ignoring_eos(route: Route) -> None:
    body = json.dumps({**json.loads(route.request.post_data or "{}"), "ignore_eos": True})
    route.continue_(post_data=body)


def _stream(*deltas: dict[str, object]) -> str:
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def _answering(page: Page, *deltas: dict[str, object]) -> None:
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=_stream(*deltas), headers={"content-type": "text/event-stream"}),
    )


def test_what_a_model_says_is_text_only(page: Page) -> None:
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    _answering(page, {"reasoning": evil}, {"content": evil})
    say(page, evil)
    expect(page.locator(".message.assistant > .text")).to_have_text(evil)
    assert page.locator("#messages img, #messages script").count() == 0
    fold = page.locator("details.fold")
    expect(fold.locator(".text")).to_be_hidden()
    fold.locator("summary").click()
    expect(fold.locator(".text")).to_have_text(evil)
    assert page.title() == "Shardline"


def test_tool_calls_are_shown_and_take_results(page: Page) -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"key":'}}
    _answering(page, {"tool_calls": [call]}, {"tool_calls": [{"index": 0, "function": {"arguments": '"a"}'}}]})
    say(page, "Look it up")
    expect(page.locator(".call h2")).to_have_text("look_up")
    expect(page.locator(".call pre")).to_contain_text('"key": "a"')
    page.unroute_all()
    sent: list[dict[str, object]] = []

    def remember(route: Route) -> None:
        sent.append(json.loads(route.request.post_data or "{}"))
        route.fulfill(body=_stream({"content": "done"}), headers={"content-type": "text/event-stream"})

    page.route("**/v1/chat/completions", remember)
    page.locator(".call input").fill("42")
    page.locator(".call input").press("Enter")
    expect(page.locator(".message.assistant").last).to_contain_text("done")
    messages = sent[0]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"key":"a"}'
    assert (messages[2]["tool_call_id"], messages[2]["content"]) == ("c1", "42")


def test_a_key_is_asked_for_and_a_killed_server_shows_and_recovers(browser: Browser) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = "--cpu-threads", "1", "--api-key", "sesame"
    with serve_demo(*flags, port=port) as first, open_page(browser, first.url) as page:
        page.goto(f"{first.url}/")
        expect(page.locator("#key-dialog")).to_be_visible()
        page.fill("#key-input", "wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-why")).to_contain_text("does not take the key")
        page.fill("#key-input", "sesame")
        page.get_by_text("Use it").click()
        expect(page.locator("#status")).to_have_class("status good")
        say(page, "Before")
        page.route("**/v1/chat/completions", _ignoring_eos)
        begin(page, "Meanwhile", tokens=1500)
        expect(page.locator(".message.assistant").last.locator(".text")).not_to_be_empty()
        first.process.kill()
        expect(page.locator(".message.assistant .wrong")).to_contain_text("has ended in the middle")
        expect(page.locator("#status")).to_have_class("status bad")
        expect(page.locator(".message.user")).to_have_count(2)
        first.process.wait()
        with serve_demo(*flags, port=port):
            expect(page.locator("#status")).to_have_class("status good")
            page.unroute_all()
            page.evaluate("document.querySelector('#params [name=max_tokens]').value = 8")
            page.locator(".again").click()
            expect(page.locator("#send")).to_be_visible()
            expect(page.locator(".message.assistant .wrong")).to_have_count(0)
            httpx.get(f"{first.url}/health").raise_for_status()
