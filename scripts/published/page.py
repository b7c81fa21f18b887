"""docs/planner-validation.md, which `make claims` writes: the errors of predictions of published rows."""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from pathlib import Path

from scripts.published.held_out import format_summary, summarize, validate
from scripts.published.rows import ROWS
from shardline.planner.hardware import known_gpus

_ROOT = Path(__file__).parents[2]
VALIDATION = _ROOT / "docs" / "planner-validation.md"
_HEAD = """# Predictions against published rows

`make claims` writes this page. Each model and each GPU is held out in turn, copies included: the constants are fitted
to the other rows, and predict those that were held out. So no row is predicted by constants that have seen its model,
or that have seen its GPU. Tier A was measured directly; tier B's tokens/s is derived. docs/planner.md says how.
"""
_REST = """
## What the remaining errors are made of

- **Speculation in rows that do not say so.** DeepSeek-R1 in FP8 on 8 B200 with TensorRT-LLM has rows of 10.3 and of 5.4
  ms at concurrency 4, which differ only in the engine's version. No formula can predict both.
- **Groups of GPUs as one size.** Rows of GB200 with tp 12 to 52 add up the GPUs of prompts and of decoding. They are
  read as one decoding group of the largest power of two. That is within a third where the groups are small or lightly
  loaded, and wrong where there were several decoding groups.
- **Kernels of an engine's version.** Launches rule small steps. gpt-oss-120b is predicted too slow by a sixth if its
  rows are held out, DeepSeek-V3 and Qwen3.5 on H200 too fast by a fifth to a quarter, and GLM-5, whose rows are of a
  nightly build, by a fifth to a third.
- **Offline throughput (tier A).** Experts on Hopper are predicted too fast if attention is in replicas: DeepSeek-R1 on
  8 H200 reaches 0.6 of the prediction with short prompts, Qwen3-235B 0.75, and gpt-oss-120b on 4 H100 0.6. A share for
  Hopper's experts, their imbalance, and gathers of all tokens do not explain it together. gpt-oss-20b with 1,500
  requests on one GB200 reaches 1.6 times the prediction: the time of each request on the host is hidden there.
- **Time to the first token.** Rows state neither how often an engine sends tokens nor whether they give a mean or a
  median. TensorRT-LLM needs 5 decode steps until the first token with the rows of one source, and 13 with those of
  another. A KV cache that is full adds the wait for a whole request; rows with such a wait are not recognized. Rows of
  DeepSeek-V3 with SGLang on B200 have 5 to 9 s at any load. Four rows of tier A differ only in the router's
  policy, which decides how much of shared prefixes is computed anew, and have 0.3 to 47 s. Their ramp of arrivals
  exceeds what the layout can do without prefixes, so TTFT depends on the length of the run, which they do not state.
- **Lengths.** SGLang's rows of Llama-3.1-8B on H200 state equal lengths, but their TTFT shows that requests are not in
  phase, so TPOT is predicted too short by a quarter.
"""
_PLANNER = "src/shardline/planner"
_INPUTS = (
    "perf/published/results.csv.gz",
    *(
        f"{_PLANNER}/{name}"
        for name in (
            "calibration.py",
            "hardware.py",
            "hardware.toml",
            "models.json",
            "timing.json",
            "timing.py",
        )
    ),
    *(f"scripts/published/{name}.py" for name in ("fitting", "held_out", "offline", "row_fields", "rows")),
    "src/shardline/models/communication.py",
    "src/shardline/models/step_work.py",
)
"""What decides the page on validation. It takes too long to be computed anew in each test run."""


def validation_text() -> str:
    """docs/planner-validation.md"""
    summary = summarize(validate(ROWS, known_gpus()))
    missed = Counter(one["why"] for one in summary["skipped"])
    constants = summary["refitted"]
    names = list(next(iter(constants.values())))
    lines = [_HEAD, f"Inputs: {input_digest()}", "\n```", format_summary(summary), "```\n"]
    lines.append(_REST)
    lines += ["## Rows without a prediction\n", "| rows | why |", "|---|---|"]
    lines += [f"| {count} | {why} |" for why, count in missed.most_common()]
    lines += ["\n## Refitted constants\n", "| fitted | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for fitted, values in constants.items():
        lines.append(f"| {fitted} | " + " | ".join(f"{values[name]:.3g}" for name in names) + " |")
    return "\n".join(lines) + "\n"


def input_digest() -> str:
    """A digest of all files that decide the page on validation. Imports do not count: files may move."""
    digest = hashlib.sha256()
    for name in _INPUTS:
        content = (_ROOT / name).read_bytes()
        digest.update(_without_imports(content) if name.endswith(".py") else content)
    return digest.hexdigest()[:16]


def _without_imports(source: bytes) -> bytes:
    lines = source.splitlines(keepends=True)
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            lines[node.lineno - 1 : node.end_lineno] = [b""] * (node.end_lineno - node.lineno + 1)
    return b"".join(line for line in lines if line.strip())
