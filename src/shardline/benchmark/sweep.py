"""Many combinations of a server's flags and a benchmark's flags, one after another.

Each combination has a folder with a file per run. A folder with a summary is finished, so that a sweep can be resumed.
"""

from __future__ import annotations

import contextlib
import csv
import json
import re
import shlex
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME_KEY = "_benchmark_name"
"""The key of a combination's own name; the others are flags."""

_SECONDS_TO_END = 60
_SECONDS_BETWEEN_PROBES = 0.5
_WORDS_OF_PATH = 120


@dataclass(frozen=True)
class Combination:
    """Flags by name (dashes or underscores), and their values."""

    flags: Mapping[str, Any]
    given_name: str = ""

    @property
    def name(self) -> str:
        """Its name; without one of its own, its flags and values."""
        return self.given_name or "-".join(f"{key}={value}" for key, value in self.flags.items())

    def apply(self, command: Sequence[str]) -> list[str]:
        """The command with these flags: a flag that it has gets another value, others are appended.

        True and False become --flag and --no-flag, objects become JSON, and None leaves a flag out.
        """
        words = list(command)
        for key, value in self.flags.items():
            _remove_flag(words, key)
            flag = "--" + _dashed(key)
            if value is True:
                words.append(flag)
            elif value is False:
                words.append("--no-" + _dashed(key))
            elif value is not None:
                words += [flag, json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
        return words

    def get(self, key: str) -> Any:
        """The value of a flag, however its name is written; None: it has none."""
        return next((value for name, value in self.flags.items() if _dashed(name) == _dashed(key)), None)


def _dashed(key: str) -> str:
    """max_num_seqs -> max-num-seqs; what follows a dot is the name of a field and keeps its underscores."""
    head, dot, rest = key.partition(".")
    return head.replace("_", "-") + dot + rest


def _remove_flag(words: list[str], key: str) -> None:
    name = _dashed(key)
    place = 0
    while place < len(words):
        flag, _, _ = words[place].partition("=")
        if flag.startswith("--") and _dashed(flag[2:]) in (name, "no-" + name):
            end = place + 1
            while "=" not in words[place] and end < len(words) and not words[end].startswith("--"):
                end += 1
            del words[place:end]
        else:
            place += 1


def read_combinations(path: str | None) -> list[Combination]:
    """The combinations in a JSON file: a list of objects, or an object of named ones. No file: one without flags.

    Raises:
        ValueError: the file holds none of these.
    """
    if path is None:
        return [Combination({})]
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if isinstance(value, dict):
        value = [{NAME_KEY: name, **flags} if isinstance(flags, dict) else flags for name, flags in value.items()]
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise ValueError(f"{path} must hold a list of objects, or an object of them, each with flags and values")
    found = [Combination({k: v for k, v in one.items() if k != NAME_KEY}, str(one.get(NAME_KEY, ""))) for one in value]
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        raise ValueError(f"{path} has two combinations that are called {max(names, key=names.count)!r}")
    return found


@dataclass(frozen=True)
class Sweep:
    serve_cmd: list[str]
    bench_cmd: list[str]
    serve_combinations: list[Combination]
    bench_combinations: list[Combination]
    folder: Path
    after_bench_cmd: list[str]
    links: list[tuple[str, str]]
    """Pairs of flags (server's, benchmark's) that must have equal values."""
    num_runs: int = 3
    warmup_prompts: int = 0
    ready_timeout: float = 300.0
    show_output: bool = False
    dry_run: bool = False
    continue_on_error: bool = False


def run_sweep(sweep: Sweep) -> list[dict[str, Any]]:
    """Run what has not been run yet, and write summary.csv; returns the results of all runs.

    Raises:
        RuntimeError: the server or the benchmark failed.
    """
    rows: list[dict[str, Any]] = []
    for serve in sweep.serve_combinations:
        benches = [bench for bench in sweep.bench_combinations if _linked(serve, bench, sweep.links)]
        missing = [bench for bench in benches if not (_folder(sweep, serve, bench) / "summary.json").exists()]
        with _recorded(sweep, _safe_name(f"SERVE-{serve.name or 'default'}-failure")):
            command = serve.apply(sweep.serve_cmd)
            server = _server(sweep, command) if missing else contextlib.nullcontext()
            with server:
                for bench in benches:
                    with _recorded(sweep, f"{_folder(sweep, serve, bench).name}-failure"):
                        rows += _run_combination(sweep, serve, bench)
    if not sweep.dry_run:
        _write_csv(sweep.folder / "summary.csv", rows)
    return rows


def _linked(serve: Combination, bench: Combination, links: Sequence[tuple[str, str]]) -> bool:
    return all(serve.get(left) is not None and serve.get(left) == bench.get(right) for left, right in links)


def _folder(sweep: Sweep, serve: Combination, bench: Combination) -> Path:
    parts = [f"SERVE-{serve.name}" if serve.name else "", f"BENCH-{bench.name}" if bench.name else ""]
    return sweep.folder / _safe_name("-".join(filter(None, parts)) or "default")


def _safe_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=+-]+", "_", name)[:_WORDS_OF_PATH]


@contextlib.contextmanager
def _recorded(sweep: Sweep, name: str) -> Iterator[None]:
    """With --continue-on-error, a failure becomes a file."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        if not sweep.continue_on_error:
            raise
        sweep.folder.mkdir(parents=True, exist_ok=True)
        (sweep.folder / f"{name}.json").write_text(json.dumps({"error": str(error)}) + "\n", encoding="utf-8")
        print(f"failed, and going on: {error}", flush=True)


@contextlib.contextmanager
def _server(sweep: Sweep, command: list[str]) -> Iterator[None]:
    """A running server for the duration of the block. It gets SIGTERM, and after a minute SIGKILL.

    Raises:
        RuntimeError: it ended, or was not ready in time.
    """
    print(f"server: {shlex.join(command)}", flush=True)
    if sweep.dry_run:
        yield
        return
    try:
        process = subprocess.Popen(command, stdout=None if sweep.show_output else subprocess.DEVNULL)
    except OSError as error:
        raise RuntimeError(f"cannot start {command[0]}: {error.strerror}") from error
    try:
        _wait_ready(process, f"{_server_url(command)}/health", sweep.ready_timeout)
        yield
    finally:
        process.terminate()
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _server_url(command: Sequence[str]) -> str:
    """Where the server of a command listens, as far as its flags say."""

    def value(names: tuple[str, ...], default: str) -> str:
        for place, word in enumerate(command):
            flag, equals, inline = word.partition("=")
            if flag in names:
                return inline if equals else (list(command[place + 1 :]) or [default])[0]
        return default

    host = value(("--host",), "127.0.0.1")
    port = value(("--port", "-p"), "8000")
    return f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"


def _wait_ready(process: subprocess.Popen[bytes], url: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode} before it was ready")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the server was not ready within {timeout:g} s ({url})")
        time.sleep(_SECONDS_BETWEEN_PROBES)


def _run_combination(sweep: Sweep, serve: Combination, bench: Combination) -> list[dict[str, Any]]:
    """The results of all runs of one combination; those that exist are read."""
    folder = _folder(sweep, serve, bench)
    if sweep.warmup_prompts > 0 and not (folder / "summary.json").exists():
        warmup = Combination({**bench.flags, "num_prompts": sweep.warmup_prompts})
        _run_benchmark(sweep, warmup, folder / "warmup.json")
    rows = []
    for number in range(sweep.num_runs):
        path = folder / f"run={number}.json"
        if not path.exists():
            _run_benchmark(sweep, bench, path)
        if sweep.dry_run:
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        rows.append({**result, "run_number": number, **serve.flags, **bench.flags})
    if rows:
        _write_whole(folder / "summary.json", json.dumps(rows, indent=1))
    return rows


def _run_benchmark(sweep: Sweep, bench: Combination, path: Path) -> None:
    """Run the benchmark, whose result is moved to `path` when it is whole."""
    part = path.with_suffix(".part")
    command = [
        *bench.apply(sweep.bench_cmd), "--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result",
        "--result-dir", str(part.parent), "--result-filename", part.name,
    ]  # fmt: skip
    print(f"benchmark: {shlex.join(command)}", flush=True)
    if sweep.dry_run:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    _call(command, sweep)
    if not part.exists():
        raise RuntimeError(f"the benchmark wrote no result: {shlex.join(command)}")
    part.replace(path)
    if sweep.after_bench_cmd:
        _call(sweep.after_bench_cmd, sweep)


def _call(command: list[str], sweep: Sweep) -> None:
    try:
        done = subprocess.run(command, stdout=None if sweep.show_output else subprocess.DEVNULL, check=False)
    except OSError as error:
        raise RuntimeError(f"cannot start {command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        raise RuntimeError(f"code {done.returncode} from: {shlex.join(command)}")


def _write_whole(path: Path, text: str) -> None:
    """Write a file that is never seen in part: its existence means that its combination is finished."""
    part = path.with_suffix(".part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The plain values of all runs as a table."""
    names = list(
        dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, (list, dict)))
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
