"""A rolling restart of the backends of a router."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from shardline.cli.main import main
from shardline.config.server import ServerConfig
from shardline.router.rollout import RolloutFailed, roll_out
from tests.router.backends import Backend, Call, Site


def ask(site: Site) -> Any:
    """Carries out actions as the command does."""

    def carry_out(action: str, url: str | None) -> Any:
        path = f"/router/{action}"
        answer = site.client.get(path) if url is None else site.client.post(path, json={"url": url})
        return answer.raise_for_status().json()

    return carry_out


def states(site: Site) -> list[str]:
    return [backend["state"] for backend in ask(site)("status", None)["backends"]]


async def no_router(call: Call) -> None:
    await call.send(b"HTTP/1.1 404 Not Found\r\nconnection: close\r\ncontent-length: 6\r\n\r\n<html>")


async def server(call: Call) -> None:
    """Says what `serve` does to a path that it does not have."""
    body = b'{"error": {"message": "Invalid URL", "code": "unknown_url"}}'
    await call.send(b"HTTP/1.1 404 Not Found\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))


def states_of(site: Site) -> list[bool]:
    return [backend.is_ready for backend in site.fleet.backends]


@pytest.mark.slow
def test_a_rollout_restarts_one_after_the_other(site: Site, tmp_path: Path) -> None:
    backends = [site.add_backend() for _ in range(3)]
    site.start_router()
    restarted, seen = tmp_path / "restarted", []

    def tell(line: str) -> None:
        if "echo" in line:  # the backend of this line is about to be restarted
            seen.append(states(site))
            backend = backends[len(seen) - 1]
            backend.ready = 503
            threading.Timer(0.3, setattr, (backend, "ready", 200)).start()

    roll_out(ask(site), f"echo {{host}} {{port}} {{url}} >> {restarted}", 20.0, tell)
    lines = [f"127.0.0.1 {backend.url.rpartition(':')[2]} {backend.url}" for backend in backends]
    assert restarted.read_text().splitlines() == lines
    assert seen == [[("draining" if index == number else "ready") for index in range(3)] for number in range(3)]
    assert states(site) == ["ready"] * 3


def test_a_rollout_waits_for_requests_in_flight(site: Site) -> None:
    site.add_backend()
    site.add_backend()
    site.start_router()
    site.fleet.backends[0].num_requests = 1
    lines: list[str] = []
    with pytest.raises(RolloutFailed, match="its requests have not ended"):
        roll_out(ask(site), "true", 0.5, lines.append)
    assert lines == [f"{site.backends[0].url} gets no new requests"], "it was not restarted"


@pytest.mark.slow
@pytest.mark.parametrize(("command", "problem"), [("exit 3", "exit code 3"), ("sleep 60", "more than 1 s")])
def test_a_rollout_stops_at_the_first_failure(site: Site, command: str, problem: str) -> None:
    for _ in range(3):
        site.add_backend()
    site.start_router()
    with pytest.raises(RolloutFailed, match=f"{problem}.*undrain {site.backends[0].url}"):
        roll_out(ask(site), command, 1.0, lambda line: None)
    assert states(site) == ["draining", "ready", "ready"]


def test_a_rollout_leaves_nobody_without_a_backend(site: Site) -> None:
    site.add_backend()
    site.start_router()
    with pytest.raises(RolloutFailed, match="no other backend is ready"):
        roll_out(ask(site), "true", 60.0, lambda line: None)
    assert states(site) == ["ready"]


def test_a_rollout_waits_for_another_backend_to_be_ready(site: Site) -> None:
    site.add_backend()
    other = site.add_backend()
    site.start_router()
    other.ready = 503
    site.wait_for(lambda: states_of(site) == [True, False])
    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        if "waits until another" in line:
            other.ready = 200

    with pytest.raises(RolloutFailed, match=rf"no other backend is ready \({other.url} is down\)"):
        roll_out(ask(site), "true", 0.0, lambda line: None)
    roll_out(ask(site), "true", 60.0, tell)
    assert lines[0] == f"{site.backends[0].url} waits until another backend is ready ({other.url} is down)"
    assert lines.count(lines[0]) == 1
    assert states(site) == ["ready", "ready"]


@pytest.mark.parametrize(("url", "port"), [("http://a", "80"), ("https://a/b", "443"), ("http://a:81", "81")])
def test_the_command_of_a_rollout_hears_the_port(url: str, port: str, tmp_path: Path) -> None:
    backend: dict[str, Any] = {"url": url, "draining": False, "requests": 0, "looks": 0, "problem": ""}

    def carry_out(*_: Any) -> Any:
        backend["looks"] += 1
        return {"backends": [backend, {"url": "http://other", "state": "draining"}, {"url": "", "state": "ready"}]}

    with pytest.raises(RolloutFailed, match="exit code 1"):
        roll_out(carry_out, f"echo {{host}} {{port}} {{url}} > {tmp_path}/restarted; false", 60.0, lambda _: None)
    assert (tmp_path / "restarted").read_text().split() == ["a", port, url]


def test_a_backend_that_was_drained_before_stays_so(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    drained = site.add_backend()
    others = [site.add_backend(), site.add_backend()]
    site.start_router()
    url = f"--url={site.client.base_url}"
    assert main(["router", "drain", drained.url, url]) == 0
    assert main(["router", "rollout", url, "--restart", "true"]) == 0
    assert f"{drained.url} is ready again, and stays drained" in capsys.readouterr().out
    status = ask(site)("status", None)["backends"]
    assert [(one["state"], one["draining"]) for one in status] == [("draining", True)] + [("ready", False)] * 2
    for backend in (drained, *others):
        backend.ready = 503
    site.wait_for(lambda: not any(states_of(site)))
    assert main(["router", "status", url]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["down"] * 3
    assert [line.endswith("(drained)") for line in lines] == [True, False, False]
    assert main(["router", "undrain", drained.url, url]) == 0
    assert "(drained)" not in capsys.readouterr().out


def test_the_key_of_an_action(site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    backend = site.add_backend()
    site.start_router(ServerConfig(api_key=("mine",), disable_access_log=True))
    url = f"--url={site.client.base_url}"
    assert main(["router", "status", url]) == 2
    assert "Pass the router's --admin-api-key, or its --api-key" in capsys.readouterr().err
    for flag in ("--api-key", "--admin-api-key"):
        assert main(["router", "status", url, flag, "mine"]) == 0
    monkeypatch.setenv("SHARDLINE_API_KEY", "mine")
    assert main(["router", "drain", backend.url, url]) == 0
    assert main(["router", "status", "--port", "9001"]) == 2
    assert "--port is for a router that starts; status asks the one at --url" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["status", "--url", "here"], "URL must look like http://127.0.0.1:8000, got 'here'"),
        (["rollout", "--restart", "true", "--step-timeout", "nan"], "--step-timeout must be seconds above 0"),
        (["rollout", "--restart", "true", "--step-timeout", "-1"], "--step-timeout must be seconds above 0"),
    ],
)
def test_mistakes_in_actions_are_named(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", *words]) == 2
    assert says in capsys.readouterr().err


def test_the_rollout_command(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    backends: list[Backend] = [site.add_backend(), site.add_backend()]
    site.start_router()
    url = f"--url={site.client.base_url}"
    assert main(["router", "rollout", url, "--restart", "true {host}"]) == 0
    output = capsys.readouterr().out
    assert all(f"{backend.url} is ready again" in output for backend in backends)
    assert main(["router", "rollout", url, "--restart", "false"]) == 1
    assert "exit code 1" in capsys.readouterr().err
    assert main(["router", "rollout", url]) == 2
    assert main(["router", "status", url, "--restart", "true"]) == 2
    assert main(["router", "rollout", "http://a", url, "--restart", "true"]) == 2
    assert "rollout takes no URL" in capsys.readouterr().err
    for other in (no_router, server):
        assert main(["router", "status", f"--url={site.add_backend(other).url}"]) == 2
        assert "is no router" in capsys.readouterr().err
