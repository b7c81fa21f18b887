"""A part of the hostile corpus: `make fuzz` runs all of it, and holds the victim's pauses to their real bounds."""

from __future__ import annotations

import json
import mmap
import os
import re
import signal
import time
from pathlib import Path

import pytest

from shardline.text import chat_template
from tests.hostile import draws, folders, lark, library, regexes, run, schemas, site, templates
from tests.hostile.bodies import Case, drawn_case, named_cases

REQUESTS = 300
LOADED_CASES = 24
BUSY = 10.0
"""How many times longer than on a quiet machine the victim's pauses may be: the suite shares the cores."""


def a_way_of_each(cases: list[Case]) -> list[Case]:
    """Of the named cases that differ only in the way in which a schema is sent, or in `n`, one; all others."""
    ways: dict[str, list[Case]] = {}
    for case in cases:
        ways.setdefault(re.split(r", (?:way|n) \d", case.name)[0], []).append(case)
    return [same[number % len(same)] for number, same in enumerate(ways.values())]


def test_no_request_ends_a_server_or_disturbs_another_client() -> None:
    found = run.Run(BUSY, batch=REQUESTS // 2).run(a_way_of_each(run.cases_of(2 * REQUESTS, seed=0))[:REQUESTS])
    assert found.failures(BUSY) == []
    assert found.answers.get(200, 0) > REQUESTS // 20, found.answers
    assert found.answers.get(400, 0) > REQUESTS // 5, found.answers


def test_templates_and_folders_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 0.5)
    assert library.run(LOADED_CASES, seed=0) == []


@pytest.mark.parametrize("name", ["a FIFO as generation_config.json", "rope_scaling.factor 1e308"])
def test_a_server_refuses_a_hostile_folder_in_one_line(name: str) -> None:
    assert library.serve_folder(folders.NAMED[name]) == ""


def test_cases_are_the_same_each_time() -> None:
    assert [drawn_case(3, number) for number in range(40)] == [drawn_case(3, number) for number in range(40)]
    assert drawn_case(3, 0) != drawn_case(4, 0)
    for kind, make in (("s", schemas.schema), ("l", lark.grammar), ("r", regexes.regex), ("t", templates.template)):
        first, second = (json.dumps([make(draws.draw(1, kind, number)) for number in range(40)]) for _ in range(2))
        assert first == second
    assert len({case.name for case in named_cases()}) == len(named_cases()) > 50


def test_folders_are_the_same_each_time(tmp_path: Path) -> None:
    for number in range(10):
        contents = []
        for folder in (tmp_path / f"{number}a", tmp_path / f"{number}b"):
            folders.make_folder(folder)
            folders.damage(draws.draw(0, "folder", number), folder)
            entries = sorted(folder.iterdir())
            contents.append([(e.name, e.is_file() and not e.is_symlink() and e.read_bytes()) for e in entries])
        assert contents[0] == contents[1]


def _take_memory() -> None:
    # Pages of its own: what Python allocates may be free memory that was inherited.
    with mmap.mmap(-1, 64 << 20) as pages:
        for start in range(0, len(pages), mmap.PAGESIZE):
            pages[start] = 1


@pytest.mark.parametrize(
    ("act", "failure"),
    [
        (lambda: None, ""),
        (lambda: int("x"), ""),
        (lambda: time.sleep(9), "not ended"),
        (lambda: dict[str, int]()["x"], "KeyError"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "died with status 9"),
        (_take_memory, "memory"),
    ],
)
def test_what_a_case_does_wrong_is_found(act, failure, monkeypatch):
    monkeypatch.setattr(library, "SECONDS", 0.5)
    monkeypatch.setattr(library, "_LATE", 0.0)
    usual = library.run_case(library.Case("a template", lambda: None)).memory
    monkeypatch.setattr(library, "MEMORY", usual + (32 << 20))
    found = library.run_case(library.Case("a template", act)).failure
    assert found.find(failure) >= 0 if failure else found == ""


@pytest.mark.parametrize(
    ("status", "kind", "body", "problem"),
    [
        (200, "application/json", b"{}", ""),
        (200, "application/json", b"{", "without JSON"),
        (400, "application/json", b'{"error":{"message":"m","type":"t","param":null,"code":"c"}}', ""),
        (400, "application/json", b'{"error":{"message":"m","type":"t","param":null}}', "another shape"),
        (400, "application/json", b'{"detail":"m"}', "another shape"),
        (404, "text/plain", b"Not Found", "without JSON"),
        (500, "application/json", b'{"error":{"message":"m","type":"t","param":null,"code":"c"}}', "500"),
        (200, "text/event-stream; charset=utf-8", b'data: {"choices":[]}\n\ndata: [DONE]\n\n', ""),
        (200, "text/event-stream", b'data: {"error":{"type":"server_error","message":"m"}}\n\n', "within a stream"),
        (200, "text/event-stream", b'data: {"error":{"type":"invalid_request_error","message":"m"}}\n\n', ""),
    ],
)
def test_what_an_answer_has_wrong_is_found(status, kind, body, problem):
    found = site.problem_of(status, {"Content-Type": kind}, body)
    assert found.find(problem) >= 0 if problem else found == ""


def test_pauses_are_held_to_their_bounds() -> None:
    found = run.Found(gaps=[0.01] * 99 + [0.09])
    assert found.failures() == []
    assert len(run.Found(gaps=[0.01] * 98 + [0.06, 0.06]).failures()) == 1
    found.gaps.append(0.2)
    assert len(found.failures()) == 1
    assert found.failures(BUSY) == []


def test_the_security_page_names_tests_that_exist() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "security.md").read_text()
    named = re.findall(r"`(tests/[\w/.]+)`", page)
    assert len(set(named)) > 15
    assert [path for path in named if not (root / path).exists()] == []
    links = re.findall(r"\]\(([^)#]+)", page)
    assert [link for link in links if not (root / "docs" / link).exists()] == []
