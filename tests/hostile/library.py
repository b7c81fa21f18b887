"""Hostile templates and model folders, loaded by the library: each one ends in time, with a ValueError or well.

    python -m tests.hostile.library --cases 1000

Each case runs in a process of its own, which is forked from one that has imported everything.
"""

from __future__ import annotations

import argparse
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from shardline.api.model_text import load_model_text
from shardline.config.engine import EngineConfig
from shardline.deployment.here import probe_here, resolve_here
from shardline.deployment.machine import Machine
from shardline.text.chat_template import ChatTemplate, Conversation, render_and_encode
from tests.hostile import draws, folders, templates

SECONDS = 10.0
MEMORY = 1 << 30
_LATE = 2.0
"""Seconds that a busy machine may be late."""
_ADDRESS_SPACE = 4 << 30
"""What ends a process that takes far too much memory more than it has from its parent, before it harms the machine."""
_CHAT = [{"role": "user", "content": "a" * 40}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@dataclass(frozen=True)
class Case:
    """`run` loads and uses something hostile; it may raise ValueError with a message of one line."""

    name: str
    run: Callable[[], None]


@dataclass(frozen=True)
class Result:
    """What a case came to. `failure` is empty if it ended as it must."""

    failure: str
    seconds: float
    memory: int


def use_template(source: str) -> None:
    """Compile and render a template."""
    template = ChatTemplate(source, {"bos_token": "<s>"})
    template.render(Conversation(_CHAT))
    template.render(Conversation(_CHAT, _TOOLS, {"x": 1}))


def use_folder(change: Callable[[Path], None]) -> None:
    """Do with a folder what a server does with it before and beside its ranks."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        folders.make_folder(folder)
        change(folder)
        config = EngineConfig.from_options(model=str(folder), device="cpu", cpu_threads=1, kv_cache_memory="32MiB")
        resolve_here(config, _machine())
        model = load_model_text(config)
        if model.tokenizer is not None:
            ids = model.tokenizer.encode_text("The first 123 é🙂\n <|end|>")
            model.tokenizer.decode(ids, skip_special_tokens=False)
            model.tokenizer.encode_text("ab " * 2000)
            if model.chat_template is not None:
                render_and_encode(model.chat_template, model.tokenizer, Conversation(_CHAT))


@cache
def _machine() -> Machine:
    return probe_here(EngineConfig.from_options(model="demo", device="cpu"))


def named_cases() -> Iterator[Case]:
    """The cases with names."""
    for name, make in templates.NAMED.items():
        yield Case(f"template: {name}", lambda make=make: use_template(make()))  # type: ignore[misc]
    for name, change in folders.NAMED.items():
        yield Case(f"folder: {name}", partial(use_folder, change))


def drawn_case(seed: int, number: int) -> Case:
    """Case `number`: those with even numbers are templates."""
    if number % 2:
        rng = draws.draw(seed, "folder", number)
        return Case(f"folder {number} of seed {seed}", lambda: use_folder(partial(folders.damage, rng)))
    return Case(
        f"template {number} of seed {seed}",
        lambda: use_template(templates.template(draws.draw(seed, "template", number))),
    )


def run_case(case: Case) -> Result:
    """Run a case in a process of its own."""
    began = time.monotonic()
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        _run_child(case, writing)
    os.close(writing)
    said = b""
    with open(reading, "rb", buffering=0) as pipe:
        # The end of the pipe may not come: what the case has started may hold it open.
        while (left := began + SECONDS + _LATE - time.monotonic()) > 0 and not said.endswith(b"END"):
            if select.select([pipe], [], [], left)[0]:
                if not (piece := pipe.read(65536)):
                    break
                said += piece
    if left <= 0:
        _kill_group(pid)
    _, status, usage = os.wait4(pid, 0)
    _kill_group(pid)  # what it has started
    inherited, _, text = said.decode(errors="replace").partition("\n")
    seconds, memory = time.monotonic() - began, (usage.ru_maxrss << 10) - int(inherited or 0)
    return Result(_failure_of(text, status, left <= 0, memory), seconds, memory)


def _resident_bytes() -> int:
    """The memory of this process, which a fork has too."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _run_child(case: Case, writing: int) -> None:
    """The process of a case. It writes what was wrong, and always a last line."""
    os.setsid()
    Path("/proc/self/clear_refs").write_text("5")  # the largest memory so far is that of now
    os.write(writing, b"%d\n" % _resident_bytes())
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # Rust reports its panics there
    inherited = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (inherited + _ADDRESS_SPACE, inherited + _ADDRESS_SPACE))
    said = ""
    try:
        case.run()
    except ValueError as error:
        if "folder" in case.name and len(str(error).splitlines()) != 1:
            said = f"the message has not one line: {error!s:.500}\n"
    except BaseException:
        said = traceback.format_exc()[-3000:]
    os.write(writing, (said + "END").encode(errors="replace"))
    os._exit(0)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _failure_of(said: str, status: int, late: bool, memory: int) -> str:
    if late:
        return f"it has not ended after {SECONDS:g} s"
    if not said.endswith("END"):
        return f"the process died with status {status}"
    if said != "END":
        return said.removesuffix("END").strip()
    if memory > MEMORY:
        return f"it took {memory >> 20} MiB of memory"
    return ""


def serve_folder(change: Callable[[Path], None]) -> str:
    """What is wrong if `shardline serve` gets such a folder: it ends with code 2 and one line, or serves until SIGTERM.

    Empty: nothing.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        folders.make_folder(folder)
        change(folder)
        command = [sys.executable, "-m", "shardline", "serve", str(folder), "--port", "0", "--kv-cache-memory", "32MiB"]
        command += ["--device", "cpu", "--cpu-threads", "1"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            lines: list[str] = []
            killer = _kill_later(process, 3 * SECONDS)
            for line in process.stdout:
                lines.append(line.rstrip())
                if "startup complete" in line:
                    process.terminate()
            code = process.wait()
            killer()
    output = "\n".join(lines)
    errors = [line for line in lines if "error:" in line]
    if "Traceback" in output or code not in (0, 2) or (code == 2 and len(errors) != 1):
        return f"exit code {code}: {output[-3000:]}"
    return ""


def _kill_later(process: subprocess.Popen[str], seconds: float) -> Callable[[], None]:
    import threading

    timer = threading.Timer(seconds, process.kill)
    timer.start()
    return timer.cancel


def run(count: int, seed: int) -> list[str]:
    """Run the named cases and as many drawn ones as make `count`; returns what failed, a text for each case."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not survive a fork
    _machine()
    named = list(named_cases())
    cases = [*named, *(drawn_case(seed, number) for number in range(count - len(named)))]
    failures = []
    for case in cases:
        result = run_case(case)
        if result.failure:
            failures.append(f"{case.name} ({result.seconds:.1f} s, {result.memory >> 20} MiB): {result.failure}")
            print(failures[-1], file=sys.stderr, flush=True)
    return failures


def main() -> int:
    """Run cases, and print what failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="only this case")
    arguments = parser.parse_args()
    if arguments.number is not None:
        result = run_case(drawn_case(arguments.seed, arguments.number))
        print(result)
        return int(bool(result.failure))
    failures = run(arguments.cases, arguments.seed)
    print(f"{'FAILED' if failures else 'PASSED'}: {arguments.cases} cases, {len(failures)} failed")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
