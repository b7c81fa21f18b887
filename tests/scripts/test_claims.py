"""The pages that `make claims` writes are those that it would write now."""

from __future__ import annotations

import pytest
from scripts.claims.document import CLAIMS, claims_text
from scripts.published.page import VALIDATION, input_digest


@pytest.mark.slow
def test_the_claims_are_those_of_the_formulas() -> None:
    text = claims_text()
    assert CLAIMS.read_text(encoding="utf-8") == text, "run `make claims`"
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| claim")]
    assert sum(line.endswith("| unchecked |") for line in rows) <= 0.1 * len(rows)


def test_the_validation_is_of_these_rows_and_formulas() -> None:
    assert f"Inputs: {input_digest()}\n" in VALIDATION.read_text(encoding="utf-8"), "run `make claims`"
