"""The files of the project that run during one streamed chat, in all processes of a server.

A server of the demo model is started with two ranks, so front, engine and workers are separate processes. Every process
gets a `sitecustomize` that records the called functions of the project while a flag file exists. The product itself has
no hook. Line counts are those of whole files.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.house.imports import PACKAGE, SOURCE

_HOOK = """
import json, os, sys, threading, time
_folder, _root = os.environ["HOUSE_TRACE"], os.environ["HOUSE_ROOT"]
_flag = os.path.join(_folder, "flag")
_calls, _on = {}, [False]

def _profile(frame, event, _):
    if event == "call" and _on[0]:
        code = frame.f_code
        if code.co_filename.startswith(_root) and code.co_name != "<module>":
            key = code.co_filename[len(_root):] + ":" + code.co_qualname
            _calls[key] = _calls.get(key, 0) + 1

def _watch():
    sys.setprofile(None)
    while True:
        on = os.path.exists(_flag)
        if _on[0] and not on:
            path = os.path.join(_folder, str(os.getpid()))
            with open(path + ".part", "w") as file:
                json.dump(dict(_calls), file)
            os.replace(path + ".part", path + ".json")
        _on[0] = on
        time.sleep(0.005)

threading.Thread(target=_watch, daemon=True).start()
threading.setprofile(_profile)
sys.setprofile(_profile)
"""
_BODY = {"messages": [{"role": "user", "content": "Hello there, how are you?"}], "stream": True, "max_tokens": 16}

_IDLE_SECONDS = 1.5
_DUMP_SECONDS = 0.5
SPINE_FUNCTIONS = 4


def num_lines(file: str) -> int:
    """Number of lines of a file. Its path is relative to src/."""
    return len((SOURCE / file).read_text().splitlines())


def touched_files(traces: Sequence[dict[str, int]]) -> list[str]:
    """Files with a function that any process ran."""
    return sorted({name.partition(":")[0] for trace in traces for name in trace})


def spine_files(traces: Sequence[dict[str, int]]) -> list[str]:
    """Files with SPINE_FUNCTIONS or more functions that ran. A reader who follows the chat has to read these."""
    functions = {name for trace in traces for name in trace}
    counts = Counter(name.partition(":")[0] for name in functions)
    return sorted(file for file, count in counts.items() if count >= SPINE_FUNCTIONS)


def trace_chat(*arguments: str) -> list[dict[str, int]]:
    """Calls of each function during the first streamed chat, per process. A key is "file:name", relative to src/.

    Functions that an idle server calls as often, such as the loops that watch its health, are left out. `arguments` are
    those of `serve`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "sitecustomize.py").write_text(_HOOK)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{folder}{os.pathsep}{SOURCE}",
            "HOUSE_TRACE": scratch,
            "HOUSE_ROOT": f"{SOURCE}{os.sep}",
        }
        command = [sys.executable, "-m", PACKAGE, "serve", "--port", str(port), *arguments]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait(lambda: "startup complete" in (folder / "log").read_text() or process.poll() is not None, 120)
            assert process.poll() is None, (folder / "log").read_text()
            idle = _traced(folder, lambda: time.sleep(_IDLE_SECONDS))
            began = time.monotonic()
            busy = _traced(folder, lambda: _chat(port))
            seconds = time.monotonic() - began
            # On a busy machine, the chat may take longer than the server has been idle.
            later = _traced(folder, lambda: time.sleep(2 * seconds)) if seconds > _IDLE_SECONDS else busy
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    traces = []
    for pid in sorted(busy):
        calls = Counter(busy[pid]) - Counter(idle.get(pid, {}))
        of_idle = Counter(idle.get(pid, {})) + (Counter(later.get(pid, {})) - Counter(busy[pid]))
        traces.append({name: count for name, count in calls.items() if count > of_idle[name]})
    return traces


def _traced(folder: Path, do: Callable[[], None]) -> dict[str, dict[str, int]]:
    """Calls of each function so far, by process id, after tracing `do()`."""
    flag = folder / "flag"
    flag.touch()
    time.sleep(0.05)
    do()
    flag.unlink()
    time.sleep(_DUMP_SECONDS)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def _chat(port: int) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(_BODY).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read().decode()
    assert text.rstrip().endswith("[DONE]"), text


def _wait(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)
