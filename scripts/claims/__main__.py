"""Write docs/claims.md and docs/planner-validation.md."""

from __future__ import annotations

from scripts.claims.document import CLAIMS, VALIDATION, claims_text, validation_text

CLAIMS.write_text(claims_text(), encoding="utf-8")
VALIDATION.write_text(validation_text(), encoding="utf-8")
