"""The proof on the page: runs again are compared, and a difference would show."""

from __future__ import annotations

import json

from playwright.sync_api import Page, Route, expect

from tests.e2e.serving import Server
from tests.ui.conftest import shoot


def test_runs_again_are_equal_alone_under_load_and_cold(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/#prove")
    page.fill("#prove-tokens", "32")
    page.fill("#prove-load", "4")
    page.click("#prove-alone")
    expect(page.locator(".run")).to_have_count(1)
    for number, button in enumerate(("#prove-again", "#prove-busy", "#prove-cold"), 1):
        page.click(button)
        expect(page.locator(".run.good")).to_have_count(number)
    expect(page.locator("#prove-verdict")).to_contain_text("Equal: 3 of 3 runs")
    expect(page.locator(".run.bad")).to_have_count(0)
    expect(page.locator(".run").first.locator(".cells i.same")).to_have_count(32)
    shoot(page, "prove")


def test_a_difference_shows(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/#prove")
    page.fill("#prove-tokens", "8")
    page.click("#prove-alone")
    expect(page.locator(".run")).to_have_count(1)

    def change(route: Route) -> None:
        answer = route.fetch()
        body = answer.json()
        body["choices"][0]["logprobs"]["content"][5]["logprob"] += 1e-7
        route.fulfill(response=answer, body=json.dumps(body))

    page.route("**/v1/chat/completions", change)
    page.click("#prove-again")
    expect(page.locator(".run.bad .result")).to_have_text("differs from token 6 on")
    expect(page.locator("#prove-verdict")).to_have_class("verdict bad")
