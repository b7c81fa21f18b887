"""The cluster on the page, and how the page looks."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.e2e.serving import Server
from tests.ui.conftest import open_page, say, shoot

LOOKS = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"color_scheme": "light", "viewport": {"width": 360, "height": 740}, "device_scale_factor": 2},
    "phone-dark": {"color_scheme": "dark", "viewport": {"width": 360, "height": 740}, "device_scale_factor": 2},
}


def test_ranks_charts_and_the_last_request_are_shown(page: Page, server: Server) -> None:
    say(page, "Anything")
    page.get_by_role("link", name="Cluster").click()
    expect(page.locator(".chart")).to_have_count(8)
    expect(page.locator(".rank")).to_have_count(2)
    expect(page.locator(".rank h2").first).to_have_text("Rank 0")
    expect(page.locator("#last")).to_contain_text("generated")
    expect(page.locator(".chart").first.locator(".stroke")).to_have_attribute("d", re.compile("^M.*L"))
    assert page.locator(".chart").nth(4).inner_text().splitlines()[0] == "KV cache in use"


def test_keys_reach_everything(page: Page) -> None:
    page.keyboard.press("Tab")
    seen = set()
    for _ in range(30):
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
        page.keyboard.press("Tab")
    assert {"prompt", "send", "show-params", "theme", "key", "messages"} <= seen
    assert {"Chat", "Cluster", "Prove it"} & seen


def test_a_router_shows_the_page_of_a_backend_with_all_of_them(browser: Browser, server: Server) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = "-m", "shardline", "router", "--backend", server.url, "--port", str(port)
    router, url = subprocess.Popen([os.environ["SHARDLINE_PYTHON"], *words]), f"http://127.0.0.1:{port}"
    try:
        server.wait_until(lambda: answers(f"{url}/ready"), "the router is ready", 60)
        with open_page(browser, url) as page:
            page.goto(f"{url}/")
            say(page, "Anything")
            page.get_by_role("link", name="Cluster").click()
            expect(page.locator(".rank")).to_have_count(2)
            expect(page.locator("#status")).to_have_class("status good")
            expect(page.locator(".chart").first.locator(".stroke")).to_have_attribute("d", re.compile("^M.*L"))
    finally:
        router.terminate()
        router.wait(30)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def busy_cluster(seen: dict[str, object]) -> dict[str, object]:
    """What a loaded server on two hosts would say, made of what this one says."""
    draw = random.Random(3)

    def walk(low: float, high: float) -> list[float]:
        value, values = (low + high) / 2, []
        for _ in range(600):
            value = min(high, max(low, value + draw.gauss(0, (high - low) / 18)))
            values.append(value)
        return values

    spans = {
        "running": (18, 34), "waiting": (0, 6), "kv_usage": (0.4, 0.7), "generation_tokens_per_second": (700, 1100),
        "prompt_tokens_per_second": (1500, 4200), "hit_rate": (0.5, 0.8), "step_seconds": (0.02, 0.034),
        "first_token": (0.12, 0.4),
    }  # fmt: skip
    series = {name: walk(*span) for name, span in spans.items()}
    for name in ("running", "waiting"):
        series[name] = [round(value) for value in series[name]]
    replicas = []
    rank = seen["replicas"][0]["ranks"][0]
    for index in range(2):
        ranks = []
        for number in range(4):
            busy = (0.93, 0.91, 0.58, 0.6)[number] - 0.04 * index
            stage, tp = divmod(number, 2)
            own = {"rank": number, "host": stage, "pp": stage, "tp": tp, "pid": 4100 + 10 * index + number}
            time = {"busy": busy, "waiting": 0.97 - busy, "step_seconds": 0.027}
            ranks.append({**rank, **own, **time, "layers": [[0, 13], [14, 23]][stage]})
        replicas.append({**seen["replicas"][0], "index": index, "ranks": ranks})
    notice = (
        "Replica 0: stage 0 is busy 93% of the time, stage 1 only 58%: the layers of stage 0 take longer on node-a. "
        "Give it fewer: --pipeline-stages (now 14,10)."
    )
    end = seen["time"]

    def percents(busy: float) -> list[int]:
        return [round(100 * value) for value in walk(busy - 0.1, min(1.0, busy + 0.06))]

    busy_history = [[percents(one["busy"]) for one in replica["ranks"]] for replica in replicas]
    return {
        **seen,
        "model": "Qwen2.5-0.5B-Instruct",
        "hosts": [{**seen["hosts"][0], "name": name, "address": address, "cores": 32, "memory_bytes": 128_000_000_000}
                  for name, address in (("node-a", "10.0.0.1"), ("node-b", "10.0.0.2"))],
        "replicas": replicas,
        "notices": [notice],
        "rates": {name: series[name][-1] for name in seen["rates"]},
        "first_token": {"count": 212, "p50": series["first_token"][-1], "p95": 0.81},
        "history": {"times": [end - 599 + n for n in range(600)], "series": series, "busy": busy_history},
    }  # fmt: skip


@pytest.mark.parametrize("look", LOOKS)
def test_looks(browser: Browser, server: Server, look: str) -> None:
    with open_page(browser, server.url, **LOOKS[look]) as page:
        page.goto(f"{server.url}/")
        say(page, "What does os.path.join do?", tokens=60)
        page.locator("#tip").evaluate("tip => tip.hidden = true")
        if look in ("light", "dark"):
            page.locator("#show-params").click()
            page.locator(".token").nth(3).hover()
        shoot(page, f"chat-{look}")
        fits(page)
        seen = httpx.get(f"{server.url}/cluster").json()

        def answer(route: Route) -> None:
            body = f"data: {json.dumps(busy_cluster(seen))}\n\n"
            route.fulfill(body=body, headers={"content-type": "text/event-stream"})

        page.route("**/cluster", answer)
        page.goto(f"{server.url}/#cluster")
        page.reload()
        expect(page.locator(".rank")).to_have_count(8)
        expect(page.locator(".notice")).to_have_count(1)
        shoot(page, f"cluster-{look}")
        fits(page)


def fits(page: Page) -> None:
    """Nothing is wider than the window."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
