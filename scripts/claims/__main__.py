"""Write docs/claims.md."""

from __future__ import annotations

from scripts.claims.document import CLAIMS, claims_text

CLAIMS.write_text(claims_text(), encoding="utf-8")
