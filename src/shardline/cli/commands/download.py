"""`shardline download MODEL`: fetch a model before it is served, once per node or shared folder."""

from __future__ import annotations

import argparse
import sys
from typing import Any

_DESCRIPTION = """Download a model from the hub, unless it is here. The last line of the output is its folder, or
its GGUF file. Of a repository with several GGUF quants, REPOSITORY:QUANT fetches one.
HF_TOKEN, HF_HOME and HF_HUB_OFFLINE have their usual meaning. Nodes that share HF_HOME download it once: the others
wait. Complete files are kept, so an interrupted download goes on where it was.
Exit codes: 0: the model is here; 1: the hub cannot be reached, try again; 2: there is no such model, or it is not
here and HF_HUB_OFFLINE is set."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("download", help="fetch a model before it is served", description=_DESCRIPTION)
    parser.add_argument(
        "model", metavar="MODEL", help="hub id, for example Qwen/Qwen3-0.6B, or unsloth/Qwen3-0.6B-GGUF:Q4_K_M"
    )
    parser.add_argument("--revision", help="branch, tag or commit (default: the main branch)")
    parser.add_argument("--tokenizer", metavar="TOKENIZER", help="hub id of a tokenizer to fetch as well")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Download, and print the model's folder."""
    from shardline.checkpoints.hub import HubUnreachable, resolve_model, resolve_tokenizer
    from shardline.config.fields import format_bytes
    from shardline.log import configure_logging

    configure_logging()
    try:
        files = resolve_model(args.model, args.revision)
        if args.tokenizer is not None:
            resolve_tokenizer(args.tokenizer)
    except HubUnreachable as error:
        raise RuntimeError(str(error)) from error
    size = sum(file.stat().st_size for file in files.weight_files)
    print(f"{args.model}: {format_bytes(size)} of weights in {len(files.weight_files)} files", file=sys.stderr)
    print(files.location)
    return 0
