"""Compares Shardline with its peers on the same workloads, checkpoint and machine, in turns: medians and ratios.

    python perf/peers/compare.py --model FOLDER \\
        --engine bf16=shardline:bf16:.venv/bin/python --engine int8=shardline:int8:.venv/bin/python \\
        --engine hf=transformers:bf16:.venv/bin/python --workloads W1,W2 --rounds 3 --baseline hf

An engine is NAME=DRIVER:PRECISION:PYTHON[,OPTION...]. DRIVER is a file of drivers/. PRECISION is bf16, int8, int4, or
"file" for a checkpoint that the driver loads as it is. PYTHON is the interpreter of the engine's environment. All
engines are loaded first and are idle while another one runs, so every run sees the same machine. In a round all engines
get the same random prompts, in an order that changes. Run nothing else on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import Measured, as_json, bar_table, rate_table

from shardline.benchmark.workload import WORKLOADS, Workload, random_prompts

_DRIVERS = Path(__file__).parent / "drivers"
_SMALLEST_VOCABULARY = 32000
"""Token ids are drawn below this number, so every model has them."""

_WARM_UP_TOKENS = 4
"""Output of the untimed first pass over every workload: engines compile and repack on a shape's first use."""

_IDLE_SECONDS = 3.0
_IDLE_ATTEMPTS = 5
_IDLE_CORES = 0.05
"""An engine that computes more than this share of a core between turns slows the others down."""


@dataclass
class Engine:
    """One driver process in its own session, and its measurements."""

    process: subprocess.Popen[str]
    measured: Measured

    @property
    def name(self) -> str:
        """The engine's name on the command line."""
        return self.measured.name

    def receive(self) -> dict[str, Any]:
        """The next line of its output.

        Raises:
            RuntimeError: the engine has ended.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with code {self.process.wait()}; its own output is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, prompts: list[list[int]], output_len: int) -> dict[str, Any]:
        """Run prompts and return seconds and tokens."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "output_len": output_len}) + "\n")
        self.process.stdin.flush()
        return self.receive()

    def _processes(self) -> Iterator[tuple[Path, list[str]]]:
        """The /proc folders of the session's processes, with the fields of stat from the third on."""
        for folder in Path("/proc").iterdir():
            if not folder.name.isdecimal():
                continue
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid:
                    yield folder, fields

    def cpu_seconds(self) -> float:
        """Processor time that all its processes have used so far."""
        ticks = sum(int(fields[11]) + int(fields[12]) for _, fields in self._processes())
        return ticks / os.sysconf("SC_CLK_TCK")

    def peak_rss_mb(self) -> float:
        """Sum of its processes' peak resident sets (VmHWM), mapped files included. Shared memory counts twice."""
        kib = 0
        for folder, _ in self._processes():
            status = (folder / "status").read_text()
            kib += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
        return kib * 1024 / 1e6

    def close(self) -> None:
        """End the process, by force if it does not end itself."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def read_through(path: Path) -> None:
    """Read a file, or a folder's files, into the page cache, so that start-up does not measure the disk."""
    for file in [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file()):
        with file.open("rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass


def start(word: str, model: Path) -> Engine:
    """Load the engine that an --engine names. Its checkpoint is converted if it needs its own format."""
    name, _, rest = word.partition("=")
    parts = rest.split(":", 2)
    if len(parts) != 3:
        raise SystemExit(f"--engine is NAME=DRIVER:PRECISION:PYTHON[,OPTION...], not {word!r}")
    driver, precision, command = parts
    python, *options = command.split(",")
    file, converter = _DRIVERS / f"{driver}_driver.py", _DRIVERS / f"{driver}_convert.py"
    if not file.exists():
        known = ", ".join(sorted(path.stem.removesuffix("_driver") for path in _DRIVERS.glob("*_driver.py")))
        raise SystemExit(f"no driver {driver!r}; known: {known}")
    weights = model
    if converter.exists() and precision != "file":
        told = subprocess.run([python, converter, model, precision], stdout=subprocess.PIPE, text=True, check=True)
        weights = Path(told.stdout.splitlines()[-1])
    read_through(weights)
    began = time.perf_counter()
    process = subprocess.Popen(
        [python, file, model, precision, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    engine = Engine(process, Measured(name, driver, precision, options))
    engine.measured.version = engine.receive()["version"]
    engine.measured.ready_s = time.perf_counter() - began
    print(f"{name}: ready after {engine.measured.ready_s:.1f} s", file=sys.stderr)
    return engine


def prompts_of(rng: random.Random, workload: Workload) -> list[list[int]]:
    """New prompts for a workload."""
    return random_prompts(rng, _SMALLEST_VOCABULARY, workload.num_prompts, workload.input_len, workload.shared_len)


def warm_up(engines: list[Engine], workloads: dict[str, Workload], rng: random.Random) -> None:
    """Run every workload's shapes once, without timing. Then check that no engine computes while it is idle."""
    for name, workload in workloads.items():
        prompts = prompts_of(rng, workload)
        for engine in engines:
            seconds = engine.ask(prompts, min(workload.output_len, _WARM_UP_TOKENS))["seconds"]
            print(f"warm-up {name} {engine.name}: {seconds:.2f} s", file=sys.stderr)
    check_idle(engines)


def check_idle(engines: list[Engine]) -> None:
    """Check that no engine computes while it is idle; what it still tidies up after a workload gets some time."""
    for attempts_left in reversed(range(_IDLE_ATTEMPTS)):
        before = [engine.cpu_seconds() for engine in engines]
        time.sleep(_IDLE_SECONDS)
        for engine, earlier in zip(engines, before, strict=True):
            engine.measured.idle_cores = (engine.cpu_seconds() - earlier) / _IDLE_SECONDS
        busiest = max(engines, key=lambda engine: engine.measured.idle_cores)
        if busiest.measured.idle_cores <= _IDLE_CORES:
            return
        if not attempts_left:
            raise SystemExit(
                f"{busiest.name} keeps {busiest.measured.idle_cores:.2f} cores busy while idle, which slows "
                "the others down: measure it alone or stop its threads from spinning"
            )


def measure(engines: list[Engine], workloads: dict[str, Workload], rounds: int, rng: random.Random) -> None:
    """Run every workload `rounds` times on every engine, in turns."""
    for index in range(rounds):
        for name, workload in workloads.items():
            prompts = prompts_of(rng, workload)
            for engine in rng.sample(engines, len(engines)):
                answer = engine.ask(prompts, workload.output_len)
                engine.measured.seconds.setdefault(name, []).append(answer["seconds"])
                engine.measured.tokens.setdefault(name, []).append(answer["tokens"])
                print(f"round {index + 1}/{rounds} {name} {engine.name}: {answer['seconds']:.2f} s", file=sys.stderr)
    for engine in engines:
        engine.measured.peak_rss_mb = engine.peak_rss_mb()


def machine() -> dict[str, Any]:
    """The facts about this computer that a reader of the figures needs."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu[0].partition(":")[2].strip() if cpu else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", action="append", required=True, metavar="NAME=DRIVER:PRECISION:PYTHON[,OPTION...]")
    parser.add_argument("--workloads", default="W1,W2,W3,W4,W5")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--baseline", help="ratios are against this engine (default: the last one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured here")
    return parser.parse_args()


def main() -> None:
    """Parse, measure, print the tables."""
    args = arguments()
    if unknown := [name for name in args.workloads.split(",") if name not in WORKLOADS]:
        raise SystemExit(f"no workload {', '.join(unknown)}; known: {', '.join(WORKLOADS)}")
    names = [word.partition("=")[0] for word in args.engine]
    if len(set(names)) < len(names) or (args.baseline or names[-1]) not in names:
        raise SystemExit(f"engines need different names, and --baseline one of them: {', '.join(names)}")
    workloads = {name: WORKLOADS[name] for name in args.workloads.split(",")}
    rng = random.Random(args.seed)
    # An engine in a long prompt does not notice that this process has ended, so `finally` must end it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    engines: list[Engine] = []
    began = time.perf_counter()
    try:
        for word in args.engine:
            engines.append(start(word, args.model))
        warm_up(engines, workloads, rng)
        measure(engines, workloads, args.rounds, rng)
    finally:
        for engine in engines:
            engine.close()
    measured = [engine.measured for engine in engines]
    baseline = measured[names.index(args.baseline or names[-1])]
    print("\n".join([*rate_table(measured, workloads, baseline), "", *bar_table(measured, workloads)]))
    print(f"took {time.perf_counter() - began:.0f} s", file=sys.stderr)
    if args.json:
        about = {"machine": machine(), "model": args.model.name, "rounds": args.rounds, "seed": args.seed}
        args.json.write_text(json.dumps(about | as_json(measured, workloads, baseline), indent=2) + "\n")


if __name__ == "__main__":
    main()
