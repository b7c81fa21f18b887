"""docs/claims.md, which `make claims` writes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from scripts.claims import communication, cost, layouts, memory, speed

CLAIMS = Path(__file__).parents[2] / "docs" / "claims.md"
_TOPICS = (memory, communication, speed, layouts, cost)
_CLAIMS_HEAD = """# Numbers that guides repeat, checked

`make claims` writes this page with the planner's formulas, for vLLM unless a line says otherwise. *Reproduced* means
within a tenth of the claim. *Corrected* means that our figure differs, and why. *Unchecked* names the fact that is
missing. Times come from constants that were fitted to published rows; docs/planner-validation.md has their errors.
"""


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
