"""Work on published measurements: `python -m scripts.published page | fit | errors | logs FILE`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import shardline.planner
from scripts.published.held_out import fit_timing, format_summary, summarize, validate
from scripts.published.page import VALIDATION, validation_text
from scripts.published.rows import ROWS
from scripts.published.start_up_logs import format_memory, summarize_memory, validate_memory
from shardline.planner.hardware import known_gpus

_TIMING = Path(shardline.planner.__file__).with_name("timing.json")


def main() -> None:
    """Do what the first word says."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    page = commands.add_parser("page", help="write docs/planner-validation.md")
    page.set_defaults(run=lambda args: VALIDATION.write_text(validation_text(), encoding="utf-8"))
    fit = commands.add_parser("fit", help="fit the constants of step times; afterwards, run `make claims`")
    fit.add_argument("rows", nargs="?", type=Path, default=ROWS, help=f"table of rows (default: {ROWS.name})")
    fit.add_argument("--output", type=Path, default=_TIMING, help="file to write (default: the one that is shipped)")
    fit.set_defaults(run=_fit)
    errors = commands.add_parser("errors", help="print the errors of rows whose model or GPU is held out of the fit")
    errors.add_argument("rows", nargs="?", type=Path, default=ROWS, help=f"table of rows (default: {ROWS.name})")
    errors.set_defaults(run=lambda args: print(format_summary(summarize(validate(args.rows, known_gpus())))))
    logs = commands.add_parser("logs", help="print the errors of KV memory against a table of start-up logs")
    logs.add_argument("table", type=Path)
    logs.set_defaults(
        run=lambda args: print(format_memory(summarize_memory(*validate_memory(args.table, known_gpus()))))
    )
    args = parser.parse_args()
    args.run(args)


def _fit(args: argparse.Namespace) -> None:
    args.output.write_text(json.dumps(fit_timing(args.rows, known_gpus()), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
