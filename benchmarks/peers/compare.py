"""Shardline against its peers on the same workloads, checkpoint and machine: interleaved, medians, ratios.

    python benchmarks/peers/compare.py --model FOLDER \\
        --engine bf16=shardline:.venv/bin/python --engine int8=shardline:.venv/bin/python,--quantization,int8 \\
        --engine hf=transformers:.venv/bin/python --workloads W1,W2 --runs 3 --baseline hf

An engine is NAME=DRIVER:PYTHON[,OPTION...]: a file of drivers/, and the interpreter of the environment it lives in.
Engines are all loaded at first and idle while another one runs, so that every run sees the same machine. Prompts are
random and new for every run. Make the checkpoint with checkpoint.py; measure alone.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardline.cli.workloads import WORKLOADS, Workload, random_prompts

_DRIVERS = Path(__file__).parent / "drivers"
_SMALLEST_VOCABULARY = 32000
"""Token ids are drawn below this, so that every model has them."""


@dataclass
class Engine:
    """One driver process and what it measured."""

    name: str
    process: subprocess.Popen[str]
    ready: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def ask(self, request: dict[str, Any] | None) -> dict[str, Any]:
        """Send a request (None: wait for the first line only) and return the answer.

        Raises:
            RuntimeError: the engine has ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if request is not None:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def start(word: str, model: Path) -> Engine:
    """The engine that a --engine names, loaded."""
    name, _, rest = word.partition("=")
    driver, _, command = rest.partition(":")
    python, *options = command.split(",")
    file = _DRIVERS / f"{driver}_driver.py"
    if not file.exists():
        raise SystemExit(
            f"no driver {driver!r}; known: {', '.join(sorted(p.stem[:-7] for p in _DRIVERS.glob('*_driver.py')))}"
        )
    process = subprocess.Popen(
        [python, str(file), str(model), *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    engine = Engine(name, process)
    engine.ready = engine.ask(None)["ready"]
    print(f"{name}: ready after {engine.ready:.1f} s", file=sys.stderr)
    return engine


def measure(engines: list[Engine], workloads: dict[str, Workload], runs: int, seed: int) -> None:
    """Every workload `runs` times on every engine, engines taking turns."""
    rng = random.Random(seed)
    for run in range(runs):
        for name, w in workloads.items():
            for engine in engines:
                prompts = random_prompts(rng, _SMALLEST_VOCABULARY, w.num_prompts, w.input_len, w.shared_len)
                seconds = engine.ask({"prompts": prompts, "output_len": w.output_len})["seconds"]
                engine.seconds.setdefault(name, []).append(seconds)
                print(f"run {run + 1}/{runs} {name} {engine.name}: {seconds:.2f} s", file=sys.stderr)


def table(engines: list[Engine], workloads: dict[str, Workload], baseline: str) -> list[str]:
    """Tokens per second (output; prompt tokens where the output is one), median [least-most], and the ratio."""
    base = next(engine for engine in engines if engine.name == baseline)
    lines = [f"| workload | {' | '.join(engine.name for engine in engines)} |", "|---" * (len(engines) + 1) + "|"]
    for name, w in workloads.items():
        tokens = w.num_prompts * (w.output_len if w.output_len > 1 else w.input_len)
        cells = []
        for engine in engines:
            seconds = engine.seconds[name]
            ratio = statistics.median(base.seconds[name]) / statistics.median(seconds)
            low, middle, high = (tokens / s for s in (max(seconds), statistics.median(seconds), min(seconds)))
            cells.append(f"{middle:.1f} [{low:.1f}-{high:.1f}] {ratio:.2f}x")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append(f"| ready, s | {' | '.join(f'{engine.ready:.1f}' for engine in engines)} |")
    return lines


def main() -> None:
    """Parse, measure, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", action="append", required=True, metavar="NAME=DRIVER:PYTHON[,OPTION...]")
    parser.add_argument("--workloads", default="W1,W2,W3,W4,W5")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--baseline", help="ratios are against this engine (default: the last one)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    workloads = {name: WORKLOADS[name] for name in args.workloads.split(",")}
    engines: list[Engine] = []
    try:
        for word in args.engine:
            engines.append(start(word, args.model))
        measure(engines, workloads, args.runs, args.seed)
        print("\n".join(table(engines, workloads, args.baseline or engines[-1].name)))
    finally:
        for engine in engines:
            assert engine.process.stdin is not None
            engine.process.stdin.close()
            engine.process.wait(60)


if __name__ == "__main__":
    main()
