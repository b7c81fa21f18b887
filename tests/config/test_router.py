"""What the router's configuration takes."""

from __future__ import annotations

import pytest

from shardline.cli.main import main
from shardline.config.router import RouterConfig, check_backend_url


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "http://a"},
        {"backend": ("ftp://x",)},
        {"backend": ("http://a", "http://a/")},
        {"backend": ("http://u:p@a",)},
        {"backend": ("http://a:99999",)},
        {"backend": ("http://",)},
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
        ("--backend http://a --backend http://a", "http://a"),
        ("--backend http://a --policy best", "least_work"),
    ],
)
def test_the_command_says_what_would_work(words: str, helps: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", *words.split()]) == 2
    assert helps in capsys.readouterr().err


def test_a_slash_at_the_end_is_no_other_backend() -> None:
    assert check_backend_url("https://a/b/") == "https://a/b"
