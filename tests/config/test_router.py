"""What the router's configuration takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.cli.main import main
from shardline.config.router import BackendSpec, RouterConfig, check_backend_url, read_backends_file
from shardline.router.fleet import Fleet


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "http://a"},
        {"backend": ("ftp://x",)},
        {"backend": ("http://a", "http://a/")},
        {"backend": ("http://a", "HTTP://A:80")},
        {"backend": ("http://u:p@a",)},
        {"backend": ("http://a:99999",)},
        {"backend": ("http://",)},
        {"backend": ("http://a..b",)},
        {"retries": 11},
        {"health_interval": 0.0},
        {"answer_timeout": float("inf")},
        {"max_backend_requests": 0},
    ],
)
def test_what_cannot_be_is_refused(options) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        RouterConfig(**options)


@pytest.mark.parametrize(
    ("words", "helps"),
    [
        ("--backend ftp://x", "http://"),
        ("--backend http://A:80 --backend http://a", "http://a is given twice"),
        ("--backend http://a --policy best", "least_work"),
    ],
)
def test_the_command_says_what_would_work(
    words: str, helps: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardline.router.launch.run_event_loop", lambda main: main.close())
    assert main(["router", *words.split()]) == 2
    assert helps in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("https://a/b/", "https://a/b"),
        ("HTTP://A:80", "http://a"),
        ("https://a:443/", "https://a"),
        ("http://a:443", "http://a:443"),
        ("http://[FE80::1]:080/B", "http://[fe80::1]/B"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_a_backend_has_one_spelling(url: str, same: str, tmp_path: Path) -> None:
    assert check_backend_url(url) == check_backend_url(same) == same
    (tmp_path / "backends").write_text(f"{url}\n")
    assert [spec.url for spec in read_backends_file(str(tmp_path / "backends"))] == [same]
    fleet = Fleet(RouterConfig((url,)))
    assert [fleet.find(url).url, fleet.find(same).url] == [same, same]
    fleet.set_backends("found", [BackendSpec(same)])
    assert len(fleet.backends) == 1
