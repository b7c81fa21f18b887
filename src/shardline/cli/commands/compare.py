"""`shardline compare URL_A URL_B`: two endpoints' answers token by token, and their speed side by side."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from shardline.cli.flags import json_value

EQUAL, DIFFERENT, NOT_COMPARED = 0, 1, 2
_PROMPTS = (
    "The capital of France is",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "def fibonacci(n):",
    "List the first ten prime numbers:",
    "Translate to German: The train leaves at nine o'clock.",
    "Once upon a time, in a village at the foot of a mountain,",
    "Summarize the rules of chess for a child.",
)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        help="compare two endpoints' answers token by token, and their speed",
        description="Ask two endpoints of any make the same prompts in turn, and show where their answers first "
        "differ, how likely each found both tokens, what the cause must be, and how fast both are. "
        "The exit code is 0 if all answers are equal, 1 if some differ, and 2 if none differs and some are missing, or "
        "nothing could be compared.",
    )
    parser.add_argument("url_a", metavar="URL_A", help="an OpenAI-compatible server, such as http://localhost:8000")
    parser.add_argument("url_b", metavar="URL_B", help="the other one")
    parser.add_argument("--model-a", metavar="NAME", help="the model at URL_A (default: the first that it lists)")
    parser.add_argument("--model-b", metavar="NAME", help="the model at URL_B (default: the first that it lists)")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompts", metavar="FILE", help='prompts, one a line: text, or JSON with a "prompt" (default: eight of ours)'
    )
    prompts.add_argument("--dataset", metavar="FILE", help="conversations of ShareGPT: first messages are prompts")
    parser.add_argument("--num-prompts", type=int, metavar="N", help="only the first N prompts")
    parser.add_argument("--chat", action="store_true", help="send each prompt as a chat's message")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens of an answer (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling, and the same for both (default: 0)")
    parser.add_argument("--header", nargs="*", metavar="KEY=VALUE", help="headers for both, such as a key")
    parser.add_argument("--extra-body", type=json_value, default={}, metavar="JSON", help="fields for both requests")
    parser.add_argument("--insecure", action="store_true", help="accept any TLS certificate")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="FILE", help="write a page, too")
    parser.set_defaults(run=run, failure=NOT_COMPARED)


def run(args: argparse.Namespace) -> int:
    """Compare, and return 0 (equal), 1 or 2."""
    import asyncio

    from tqdm import tqdm

    from shardline import env
    from shardline.benchmark.datasets import sharegpt
    from shardline.benchmark.session import read_pairs
    from shardline.compare.answers import Endpoint, Options
    from shardline.compare.comparison import compare_async
    from shardline.compare.report import html_page, text_lines

    prompts = _read_prompts(args.prompts) if args.prompts else list(_PROMPTS)
    if args.dataset:
        prompts = [prompt for prompt, _ in sharegpt.read_pairs(args.dataset)]
        if not prompts:
            raise ValueError(f"{args.dataset} has no conversations")
    if args.num_prompts is not None and args.num_prompts < 1:
        raise ValueError("--num-prompts must be 1 or more")
    if args.max_tokens < 1:
        raise ValueError("--max-tokens must be 1 or more")
    if not isinstance(args.extra_body, dict):
        raise ValueError("--extra-body takes a JSON object")
    if not math.isfinite(args.temperature):  # JSON has no such number
        raise ValueError(f"--temperature must be a number, got {args.temperature}")
    if args.html and not Path(args.html).absolute().parent.is_dir():
        raise ValueError(f"--html {args.html}: its folder does not exist")
    prompts = prompts[: args.num_prompts]
    key = env.openai_api_key() or env.api_key()
    headers = ({"Authorization": f"Bearer {key}"} if key else {}) | read_pairs(args.header, "--header")
    options = Options(args.chat, args.max_tokens, args.temperature, args.seed, args.extra_body)
    with tqdm(total=len(prompts), unit="prompt", leave=False, disable=not sys.stderr.isatty()) as bar:
        found = asyncio.run(
            compare_async(
                Endpoint(args.url_a, args.model_a, headers),
                Endpoint(args.url_b, args.model_b, headers),
                prompts,
                options,
                insecure=args.insecure,
                on_pair=lambda _: bar.update(),
                on_wait=lambda line: bar.write(line, file=sys.stderr),
            )
        )
    if args.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        print("\n".join(text_lines(found)))
    if args.html:
        try:
            Path(args.html).write_text(html_page(found), encoding="utf-8")
        except OSError as error:
            raise OSError(f"--html {args.html} cannot be written: {error.strerror}") from error
    return EQUAL if found.equal else DIFFERENT if found.causes else NOT_COMPARED


def _read_prompts(name: str) -> list[str]:
    """Raises ValueError: there is no such file, or a line has no prompt."""
    try:
        lines = Path(name).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts: cannot read {name}: {error}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt: Any = line
        if line.lstrip().startswith("{"):
            try:
                prompt = json.loads(line).get("prompt")
            except ValueError as error:
                raise ValueError(f"{name}, line {number}: {error}") from error
        if not isinstance(prompt, str):
            raise ValueError(f'{name}, line {number}: the object needs a text "prompt"')
        if any("\ud800" <= letter <= "\udfff" for letter in prompt):
            raise ValueError(f"{name}, line {number}: the prompt has half a surrogate pair, which no request can have")
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{name} has no prompts")
    return prompts
