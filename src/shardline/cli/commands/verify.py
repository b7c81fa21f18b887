"""`shardline verify RECEIPT --model M`: whether an answer is the one that the model gives, bit for bit."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.cli.flags import add_engine_flags, engine_config

if TYPE_CHECKING:
    from shardline.receipts.receipt import Receipt

EQUAL, DIFFERENT, NOT_VERIFIED = 0, 1, 2


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="check the receipt of an answer",
        description="Run the request of a receipt again, on any layout, and compare all tokens and the digests of "
        "their logits. The exit code is 0 if they are equal, 1 if those of a receipt are not, and 2 if nothing can be "
        "said of one, since it is of another model or has another form, or the model cannot run.",
    )
    group = parser.add_argument_group("receipts")
    group.add_argument(
        "receipt",
        metavar="RECEIPT",
        help="a file with a receipt, or with an answer that has receipts; -: standard input",
    )
    group.add_argument("--json", action="store_true", help="print JSON, one line for each receipt")
    add_engine_flags(parser)
    parser.set_defaults(run=run, failure=NOT_VERIFIED)


def run(args: argparse.Namespace) -> int:
    """Verify all receipts of the file, and return 0 (all are equal), 1 or 2."""
    import msgspec

    from shardline.api.llm import LLM

    config, receipts = engine_config(args), _read(args.receipt)
    with LLM.from_config(config) as llm:
        verdicts = llm.verify(receipts)
    for verdict in verdicts:
        print(json.dumps(msgspec.to_builtins(verdict)) if args.json else verdict)
    wrong = [verdict for verdict in verdicts if not verdict.equal]
    return EQUAL if not wrong else NOT_VERIFIED if all(verdict.error for verdict in wrong) else DIFFERENT


def _read(name: str) -> list[Receipt]:
    from shardline.receipts.receipt import find_receipts

    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {name}: {error}") from error
    return find_receipts(data)
