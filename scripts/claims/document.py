"""The pages that `make claims` writes."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

from scripts.claims import communication, cost, layouts, memory, speed
from shardline.planner.hardware import known_gpus
from shardline.planner.validate import format_summary, summarize, validate

_ROOT = Path(__file__).parents[2]
CLAIMS, VALIDATION = _ROOT / "docs" / "claims.md", _ROOT / "docs" / "planner-validation.md"
_TOPICS = (memory, communication, speed, layouts, cost)
_CLAIMS_HEAD = """# Numbers that guides repeat, checked

`make claims` writes this page with the planner's formulas, for vLLM unless a line says otherwise. *Reproduced* means
within a tenth of the claim. *Corrected* means that our figure differs, and why. *Unchecked* names the fact that is
missing. Times come from constants that were fitted to published rows; docs/planner-validation.md has their errors.
"""
_VALIDATION_HEAD = """# Predictions against published rows

`make claims` writes this page. Each model and each GPU is held out in turn, copies included: the constants are fitted
to the other rows, and predict those that were held out. So no row is predicted by constants that have seen its model,
or that have seen its GPU. Tier A was measured directly; tier B's tokens/s is derived. docs/planner.md says how.
"""
_INPUTS = (
    "benchmarks/published/results.csv.gz",
    *(
        f"src/shardline/planner/{name}"
        for name in (
            "calibration.py",
            "fitting.py",
            "hardware.toml",
            "models.json",
            "rows.py",
            "timing.json",
            "timing.py",
            "validate.py",
        )
    ),
    "src/shardline/models/communication.py",
    "src/shardline/models/step_work.py",
)
"""What decides the page on validation. It takes too long to be computed anew in each test run."""


def claims_text() -> str:
    """docs/claims.md"""
    lines = [_CLAIMS_HEAD]
    counts: Counter[str] = Counter()
    for topic in _TOPICS:
        lines += [f"\n## {topic.TITLE}\n", "| claim | our figure | |", "|---|---|---|"]
        for claim in topic.claims():
            counts[claim.verdict] += 1
            lines.append(f"| {claim.quote} | {claim.ours} | {claim.verdict} |")
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("reproduced", "corrected", "unchecked"))
    lines.insert(1, f"{sum(counts.values())} claims: {told}.")
    return "\n".join(lines) + "\n"


def validation_text() -> str:
    """docs/planner-validation.md"""
    summary = summarize(validate(speed.ROWS, known_gpus()))
    missed = Counter(one["why"] for one in summary["skipped"])
    constants = summary["refitted"]
    names = list(next(iter(constants.values())))
    lines = [_VALIDATION_HEAD, f"Inputs: {input_digest()}", "\n```", format_summary(summary), "```\n"]
    lines += ["## Rows without a prediction\n", "| rows | why |", "|---|---|"]
    lines += [f"| {count} | {why} |" for why, count in missed.most_common()]
    lines += ["\n## Refitted constants\n", "| fitted | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for fitted, values in constants.items():
        lines.append(f"| {fitted} | " + " | ".join(f"{values[name]:.3g}" for name in names) + " |")
    return "\n".join(lines) + "\n"


def input_digest() -> str:
    """A digest of all files that decide the page on validation."""
    digest = hashlib.sha256()
    for name in _INPUTS:
        digest.update((_ROOT / name).read_bytes())
    return digest.hexdigest()[:16]
