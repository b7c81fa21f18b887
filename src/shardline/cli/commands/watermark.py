"""`shardline watermark key|detect`: make the key with which answers are marked, and look for its mark in a text."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.watermark import SCHEMES

if TYPE_CHECKING:
    from shardline.watermark.detector import Detection


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "watermark",
        help="make a watermark's key, and look for its mark in a text",
        description="Make the key with which a server marks its answers (--watermark-config), and look for its mark.",
    )
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    key = actions.add_parser("key", help="write a new key", description="Write a new random key, readable by you only.")
    key.add_argument("key_file", metavar="FILE", help="the file to write; it must not exist")
    key.add_argument("--scheme", choices=SCHEMES, default="kgw", help="of the mark (default: kgw)")
    key.set_defaults(run=run_key)
    detect = actions.add_parser(
        "detect",
        help="look for a key's mark in a text",
        description="Print how far the text is from one without the mark (z), how likely a text without it is as far "
        "(p), and how many tokens count. An n-gram that occurs again counts once. Leave prompts out.",
    )
    detect.add_argument("file", metavar="FILE", help="the text, in UTF-8; -: standard input")
    detect.add_argument("--key-file", required=True, metavar="KEY", help="the key with which answers were marked")
    detect.add_argument("--model", help="the model that may have written the text (default: demo)")
    detect.add_argument("--tokenizer", metavar="TOKENIZER", help="default: the model's own")
    detect.add_argument("--token-ids", action="store_true", help="FILE is a JSON list of the answer's token ids")
    detect.add_argument("--json", action="store_true", help="print JSON")
    detect.set_defaults(run=run_detect)


def run_key(args: argparse.Namespace) -> int:
    """Write a key file."""
    from shardline.watermark.keys import new_key, write_key

    write_key(new_key(args.scheme), args.key_file)
    print(f"wrote a key of the scheme {args.scheme} to {args.key_file}; keep it secret")
    return 0


def run_detect(args: argparse.Namespace) -> int:
    """Score a text and print the figures."""
    from shardline.api.model_text import load_model_text
    from shardline.config.engine import EngineConfig
    from shardline.watermark.detector import detect
    from shardline.watermark.keys import read_key

    key = read_key(args.key_file)
    text = _read(args.file)
    name = "demo" if args.model is None else args.model
    config = EngineConfig.from_options(
        model=name, tokenizer=args.tokenizer, skip_tokenizer_init=args.token_ids, generation_config="vllm"
    )
    model = load_model_text(config)
    if args.token_ids:
        ids = _parse_ids(text)
    elif model.tokenizer is None:
        lacking = args.tokenizer or name
        raise ValueError(f"{lacking} has no tokenizer: give one with --tokenizer, or ids with --token-ids")
    else:
        ids = model.tokenizer.encode_text(text, False)
    found = detect(ids, key, model.vocab_size)
    used = None if args.token_ids else args.tokenizer or name
    if args.json:
        print(json.dumps({"model": name, "tokenizer": used} | _as_json(found), indent=2))
    else:
        by = f"ids of {name}" if used is None else f"by the tokenizer of {used}"
        note = "" if args.model else " (the default: --model names the model that may have written the text)"
        print("\n".join([f"tokens          {by}{note}", *_lines(found)]))
    return 0


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"cannot read {name}: it is no text in UTF-8") from None


def _parse_ids(text: str) -> list[int]:
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError):
        ids = None
    if not isinstance(ids, list) or not all(type(token_id) is int for token_id in ids):
        raise ValueError("with --token-ids, the file must be a JSON list of whole numbers")
    return ids


def _as_json(found: Detection) -> dict[str, Any]:
    return {name: getattr(found, name) for name in found.__struct_fields__}


def _lines(found: Detection) -> list[str]:
    what = "green tokens" if found.scheme == "kgw" else "mean of bits"
    return [
        f"scheme          {found.scheme}",
        f"counted tokens  {found.num_counted} of {found.num_tokens}",
        f"{what}    {100 * found.score:.2f}%, and {100 * found.expected:.2f}% are expected without the mark",
        f"z               {found.z_score:.3f}",
        f"p               {found.p_value:.3g}",
    ]
