"""Fit the constants of step times to published rows, and write them to timing.json: `python -m scripts.fit_timing`.

Run it after a change of the formulas or of the rows, and then `make claims`. It takes seconds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import shardline.planner
from scripts.claims.speed import ROWS
from shardline.planner.hardware import known_gpus
from shardline.planner.validate import fit_timing

_TIMING = Path(shardline.planner.__file__).with_name("timing.json")


def main() -> None:
    """Fit and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="?", type=Path, default=ROWS, help=f"table of rows (default: {ROWS.name})")
    parser.add_argument("--output", type=Path, default=_TIMING, help="file to write (default: the one that is shipped)")
    arguments = parser.parse_args()
    fitted = fit_timing(arguments.rows, known_gpus())
    arguments.output.write_text(json.dumps(fitted, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
