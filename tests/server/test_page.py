"""The page at /: its files, what they may not do, and who may have them. tests/ui looks at it in a browser."""

from __future__ import annotations

import re
from importlib.resources import files

import httpx
import pytest

from shardline.config.server import ServerConfig
from tests.server.conftest import serve

FILES = {
    file.name: file.read_text()
    for file in files("shardline.server.ui").iterdir()
    if file.name.endswith((".html", ".css", ".js", ".svg"))
}


def test_it_and_all_it_names_are_there(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = set(re.findall(r'(?:src|href)="(ui/[^"]+)"', page.text))
    named |= {f"ui/{name}" for text in FILES.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert named == {f"ui/{name}" for name in FILES if name != "index.html"}
    for name in named:
        assert http.get(f"/{name}").status_code == 200
    assert http.get("/ui/nothing.js").status_code == 404
    assert http.get("/ui/__init__.py").status_code == 404


def test_its_policy_lets_nothing_in(http: httpx.Client) -> None:
    policy = http.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy
    for name, text in FILES.items():
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert word not in text, (name, word)
        elsewhere = re.sub("http://www.w3.org/2000/svg", "", text)
        assert not re.search(r"https?://|//[a-z]+\.[a-z]", elsewhere), name


def test_it_is_small() -> None:
    assert sum(len(text.encode()) for text in FILES.values()) <= 150_000


def test_a_browser_that_has_it_gets_no_second_one(http: httpx.Client) -> None:
    first = http.get("/ui/app.js")
    again = http.get("/ui/app.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_it_needs_no_key_and_what_it_shows_does() -> None:
    with serve(ServerConfig(port=0, api_key=("secret",), root_path="/behind")) as running, running.http() as http:
        assert http.get("/").status_code == 200
        assert http.get("/ui/app.js").status_code == 200
        for path in ("/cluster", "/v1/models", "/ui", "/ui/../v1/models"):
            assert http.get(path).status_code in (401, 404), path


def test_without_it_its_paths_need_a_key() -> None:
    with serve(ServerConfig(port=0, api_key=("secret",), disable_ui=True)) as running, running.http() as http:
        assert [http.get(path).status_code for path in ("/", "/ui/app.js")] == [401, 401]


@pytest.mark.parametrize("path", ["/", "/ui/app.js"])
def test_it_can_be_left_out(path: str) -> None:
    with serve(ServerConfig(port=0, disable_ui=True)) as running, running.http() as http:
        assert http.get(path).status_code == 404
