"""What a card shows at first: `make gpu-first-light`, or `python -m perf.gpu.first_light [--parts …]`.

It needs the built kernels (`make dev`) and a torch for the card. Each part has its own process and time limit, so a
part that fails or hangs does not hide the others. The first parts answer whether the card is right: `proof` tries the
Triton kernels of several models, `parity` compares with transformers, `tokens` and `layouts` compare batches and ranks
with one request on one rank, and `server` serves the demo model. `engine` measures decode and prefill as shares of the
card's ceilings. It writes one page, docs/gpu/<card>.md, that can be sent in.

More parts, of several minutes each: `waiting`, `bits`, `kernels`, `library`, `families`. A dry run without a card, on
small models: `make gpu-first-light DEVICE=cpu KERNELS=torch`; its page is in build/.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_LIMITS = {
    "ceilings": 45,
    "proof": 240,
    "parity": 400,
    "tokens": 400,
    "layouts": 900,
    "server": 240,
    "engine": 600,
    "waiting": 120,
    "bits": 120,
    "kernels": 135,
    "library": 150,
    "families": 420,
}
"""Seconds of each part."""
FIRST = ("ceilings", "proof", "parity", "tokens", "layouts", "server", "engine")
_PROVED: dict[str, dict[str, str]] = {
    "llama": {},
    "mixtral": {},
    "deepseek_v3": {},
    "cohere2": {},
    "llama, int8_fast": {"quantization": "int8_fast"},
    "llama, int4_fast": {"quantization": "int4_fast"},
}
"""Models, whose kernels are tried, and options of engines for them."""


def measure_ceilings(on: dict[str, str]) -> dict[str, Any]:
    """Bytes a second of a large copy, read plus written, and FLOP a second of a large bf16 product of random data."""
    import torch

    device = torch.device(on["device"])
    module = torch.get_device_module(device)
    small = device.type == "cpu"

    def fastest(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(13):
            module.synchronize()
            begun = time.perf_counter()
            call()
            module.synchronize()
            times.append(time.perf_counter() - begun)
        return sorted(times[3:])[len(times[3:]) // 2]

    source = torch.empty(1 << (28 if small else 31), dtype=torch.uint8, device=device).fill_(7)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / fastest(lambda: target.copy_(source))
    size = 1024 if small else 8192
    a, b = (torch.randn(size, size).to(device, torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    flops = 2 * size**3 / fastest(lambda: torch.mm(a, b, out=out))
    name = "CPU" if small else module.get_device_name() if hasattr(module, "get_device_name") else device.type
    return {"card": name, "torch": torch.__version__, "copy_bytes_per_s": copy, "flops": flops}


def prove(on: dict[str, str]) -> dict[str, Any]:
    """The verdicts of `shardline doctor --kernels` about several models."""
    from perf.gpu.families import random_model

    from shardline.config.engine import EngineConfig
    from shardline.doctor.kernels import prove_kernels

    result: dict[str, Any] = {}
    for name, options in _PROVED.items():
        with random_model(name.partition(",")[0]) as folder:
            cards = prove_kernels(EngineConfig.from_options(model=folder, max_model_len=512, **on, **options))
        for verdicts in (card.verdicts for card in cards):
            failed = {f"{verdict.case.kernel} ({verdict.case.shape})": verdict.problem for verdict in verdicts}
            result[name] = {
                "tried": len(verdicts),
                "seconds": sum(verdict.seconds for verdict in verdicts),
                "failed": {case: problem for case, problem in failed.items() if problem},
            }
    return result or {"llama": {"tried": 0, "why": "no kernel of Triton runs with these options"}}


def run_part(name: str, on: dict[str, str], ceilings: dict[str, float]) -> Any:
    """Run one part in this process."""
    if name == "ceilings":
        return measure_ceilings(on)
    if name == "proof":
        return prove(on)
    if name == "tokens":
        from perf.gpu import engine

        return engine.same_tokens(on)
    if name == "waiting":
        from perf.gpu import waiting

        return waiting.launches_do_not_wait(device=on["device"])
    module = importlib.import_module(f"perf.gpu.{_MODULES.get(name, name)}")
    if name in ("parity", "layouts", "server"):
        return module.run(on)
    if name == "engine":
        return module.run(ceilings, on)
    return module.run(on["device"]) if name == "bits" else module.run(ceilings)


_MODULES = {"server": "demo_server", "kernels": "kernel_times"}


def run_in_process(name: str, on: dict[str, str], ceilings: dict[str, float]) -> dict[str, Any]:
    """Run a part in its own process; returns {"seconds", and "result" or "error"}."""
    paths = [str(_ROOT / "src"), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "perf.gpu.first_light", "--part", name, "--ceilings", json.dumps(ceilings)]
        command += [word for key, value in on.items() for word in (f"--{key}", value)]
        outcome: dict[str, Any] = {}
        try:
            done = subprocess.run(
                [*command, "--output", str(answer)],
                env=environment,
                cwd=_ROOT,
                timeout=_LIMITS[name],
                stdout=sys.stderr,
            )
            if done.returncode != 0:
                outcome["error"] = f"ended with status {done.returncode}"
        except subprocess.TimeoutExpired:
            outcome["error"] = f"not finished in {_LIMITS[name]} s"
        if answer.exists():
            outcome["result"] = json.loads(answer.read_text())
    return {**outcome, "seconds": round(time.perf_counter() - started, 1)}


def has_failed(result: Any) -> bool:
    """Whether a result contains a failure, a value that is not ok, or a traceback. A missed bar is not a failure."""
    if isinstance(result, dict):
        told = bool(result.get("failed")) or result.get("ok") is False
        return told or any(has_failed(value) for value in result.values())
    return isinstance(result, str) and result.startswith("Traceback")


def failed_parts(report: dict[str, Any]) -> list[str]:
    """The names of the parts that failed or did not end."""
    return [name for name, part in report.items() if "error" in part or has_failed(part.get("result"))]


def lines_of(value: Any, path: str = "") -> list[tuple[str, str]]:
    """(place, words) of a result: a line for each leaf, and one for an entry that holds only numbers."""
    if isinstance(value, dict) and any(isinstance(part, dict) for part in value.values()):
        return [
            line for name, part in value.items() for line in lines_of(part, f"{path} / {name}" if path else str(name))
        ]
    if isinstance(value, dict):
        return [(path, ", ".join(f"{name} {_words(part)}" for name, part in value.items()) or "none")]
    return [(path, _words(value))]


def _words(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value).strip()
    return text.splitlines()[-1] if text else ""


def page_of(report: dict[str, Any], on: dict[str, str], versions: dict[str, str]) -> str:
    """The page in Markdown."""
    card = report.get("ceilings", {}).get("result", {}).get("card", on["device"])
    failed = failed_parts(report)
    lines = [f"# {card}", "", f"What `make gpu-first-light` found ({', '.join(f'{k} {v}' for k, v in on.items())})."]
    lines += ["", ", ".join(f"{name} {version}" for name, version in versions.items()) + "."]
    lines += ["", f"Parts that failed: {', '.join(failed)}." if failed else "No part failed."]
    for name, part in report.items():
        lines += ["", f"## {name} ({part['seconds']} s)", "", "| what | found |", "|---|---|"]
        found = [("", part["error"])] if "error" in part else []
        for place, words in found + (lines_of(part["result"]) if "result" in part else []):
            lines.append(f"| {place or name} | {words.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def page_name(card: str) -> str:
    """The name of the file for a card."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-") + ".md"


def _versions() -> dict[str, str]:
    import importlib.metadata

    import shardline

    found = {"Shardline": shardline.__version__, "Python": sys.version.split()[0]}
    for package in ("torch", "triton"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        found["driver"] = driver.read_text().splitlines()[0].partition(": ")[2].strip()
    return found


def main() -> int:
    """See the docstring of this module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", help="as of `shardline serve` (default: %(default)s)")
    parser.add_argument("--kernels", default="auto", help="as of `shardline serve` (default: %(default)s)")
    parser.add_argument("--parts", default=",".join(FIRST), help="only these (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="also write all figures here, as JSON")
    parser.add_argument("--page", type=Path, help="the page (default: docs/gpu/<card>.md; of a CPU: build/gpu/cpu.md)")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--ceilings", type=json.loads, default={}, help=argparse.SUPPRESS)
    args = parser.parse_args()
    on = {"device": args.device, "kernels": args.kernels}
    if args.part:
        args.output.write_text(json.dumps(run_part(args.part, on, args.ceilings)))
        return 0
    parts = args.parts.split(",")
    if unknown := [name for name in parts if name not in _LIMITS]:
        print(f"there is no part {unknown[0]}; there are {', '.join(_LIMITS)}", file=sys.stderr)
        return 2
    import torch

    if args.device != "cpu" and not torch.get_device_module(args.device).is_available():
        print(f"torch {torch.__version__} finds no device {args.device}; a dry run: --device cpu --kernels torch",
              file=sys.stderr)  # fmt: skip
        return 2
    report: dict[str, Any] = {}
    ceilings: dict[str, Any] = {}
    for name in parts:
        report[name] = run_in_process(name, on, ceilings)
        if name == "ceilings":
            ceilings = report[name].get("result", {"copy_bytes_per_s": float("nan"), "flops": float("nan")})
        print(f"{name}: {report[name]['seconds']} s", file=sys.stderr)
        if args.output:
            args.output.write_text(json.dumps(report, indent=1))
    card = ceilings.get("card", args.device)
    folder = _ROOT / ("build/gpu" if args.device == "cpu" else "docs/gpu")
    page = args.page or folder / page_name(card)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(page_of(report, on, _versions()))
    failed = failed_parts(report)
    print(f"parts that failed: {', '.join(failed) or 'none'}; the page is {page}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
