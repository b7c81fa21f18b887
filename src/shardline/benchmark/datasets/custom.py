"""Prompts of the user's own, one JSON object per line: {"prompt": "...", "output_tokens": 100}."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from shardline.benchmark.datasets._reading import fill_up, read_json_lines, require_count, require_path
from shardline.benchmark.server_tokenizer import PromptTokenizer, ServerTokenizer
from shardline.benchmark.workload import Sample


def add_flags(parser: Any) -> None:
    group = parser.add_argument_group("custom dataset")
    group.add_argument(
        "--custom-output-len",
        type=int,
        default=256,
        help="tokens of an output; -1: each line's output_tokens (default: 256)",
    )


def load_samples(args: argparse.Namespace, tokenizer: PromptTokenizer | None) -> list[Sample]:
    path = require_path(args)
    rows = []
    for number, row in read_json_lines(path):
        if not isinstance(row.get("prompt"), str):
            raise ValueError(f"{path}, line {number}: the object needs a text 'prompt'")
        output_len = args.custom_output_len
        if output_len == -1:
            output_len = require_count(row.get("output_tokens"), "output_tokens", f"{path}, line {number}")
        rows.append((row["prompt"], output_len))
    if not rows:
        raise ValueError(f"{path} has no prompts")
    if not args.disable_shuffle:
        random.Random(args.seed).shuffle(rows)
    count = args.num_prompts if args.num_prompts > 0 else len(rows)
    prompts = [text for text, _ in rows[:count]]
    if tokenizer is None:
        lengths = [1] * len(prompts)
    else:
        # The chat endpoint applies the template itself.
        if not args.skip_chat_template and args.backend != "openai-chat":
            prompts = _apply_template(args, tokenizer, prompts)
        lengths = [len(ids) for ids in tokenizer.encode_texts(prompts)]
    samples = [
        Sample(text, length, output_len) for text, length, (_, output_len) in zip(prompts, lengths, rows, strict=False)
    ]
    return fill_up(samples, count, args.seed, oversample=not args.no_oversample)


def _apply_template(args: argparse.Namespace, tokenizer: PromptTokenizer, prompts: list[str]) -> list[str]:
    """Each prompt as a chat with one message; unchanged if the model has no chat template."""
    from shardline.text.chat_template import ChatTemplate, Conversation

    if isinstance(tokenizer, ServerTokenizer):
        raise ValueError("chat templates need the model's files: give --tokenizer FOLDER, or --skip-chat-template")
    template = ChatTemplate.from_folder(Path(args.tokenizer_folder), tokenizer.special_tokens)
    if template is None:
        return prompts
    options = args.chat_template_kwargs
    variables = dict(json.loads(options) if isinstance(options, str) else options or {})
    asks = variables.pop("add_generation_prompt", True)
    return [
        template.render(Conversation([{"role": "user", "content": text}], None, variables, asks)) for text in prompts
    ]
