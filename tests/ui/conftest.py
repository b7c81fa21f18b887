"""A browser, and a server with two ranks. `make ui` runs these tests in an environment without Shardline."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.e2e.serving import Server, serve

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or ""
SHOTS = Path(__file__).parents[2] / "build" / "ui"
PATIENCE = float(os.environ.get("UI_PATIENCE", "20"))
"""Seconds that the page may take to show something; a busy machine needs more."""

expect.set_options(timeout=1000 * PATIENCE)


def serve_demo(*arguments: str, port: int = 0) -> AbstractContextManager[Server]:
    return serve("demo", *arguments, python=os.environ["SHARDLINE_PYTHON"], port=port)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with serve_demo("--tensor-parallel-size", "2", "--cpu-threads", "1") as server:
        yield server


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if not CHROMIUM:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("there is no Chromium: apt-get install chromium")
    with sync_playwright() as driver:
        # Chromium's own sandbox refuses to run as root.
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def open_page(browser: Browser, url: str, **options: object) -> Iterator[Page]:
    """A page that may ask its own origin only, and write no error to its console."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    context.set_default_timeout(1000 * PATIENCE)
    page = context.new_page()
    wrong: list[str] = []
    page.on("request", lambda request: None if request.url.startswith(url) else wrong.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    # Chromium itself writes that a request was refused; that belongs to the tests that have one refused.
    page.on(
        "console",
        lambda line: wrong.append(line.text) if line.type == "error" and "Failed to load" not in line.text else None,
    )
    try:
        yield page
    finally:
        context.close()
    assert not wrong, wrong


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    with open_page(browser, server.url) as page:
        page.goto(f"{server.url}/")
        yield page


def say(page: Page, text: str, *, tokens: int = 24) -> None:
    """Ask for a short answer, and wait for its end."""
    begin(page, text, tokens=tokens)
    expect(page.locator("#send")).to_be_visible()


def begin(page: Page, text: str, *, tokens: int) -> None:
    """Ask for an answer."""
    page.evaluate("tokens => { document.querySelector('#params [name=max_tokens]').value = tokens }", str(tokens))
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def shoot(page: Page, name: str) -> None:
    """Keep a picture for people to look at."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png")
