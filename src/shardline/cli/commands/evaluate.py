"""`shardline evaluate MODEL --quantization SCHEME --kv-cache-dtype int8`: how much quality a quantization costs."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.cli.flags import add_engine_flags, engine_config

if TYPE_CHECKING:
    from shardline.api.model_text import ModelText
    from shardline.config.engine import EngineConfig
    from shardline.runtime.scoring import Document, Quality

_WINDOW = 512
"""Number of tokens of a text that are scored together."""


def add_parser(commands: Any) -> None:
    description = "Compare a quantized model with the same model in its own dtype, token by token over a text."
    parser = commands.add_parser("evaluate", help="measure what a quantization costs", description=description)
    group = parser.add_argument_group("evaluation")
    group.add_argument("--text", type=Path, metavar="FILE", help="plain text to score (default: the demo model's own)")
    group.add_argument(
        "--against",
        metavar="MODEL",
        help="the unquantized model, if MODEL is a quantized checkpoint of it (default: MODEL itself, dequantized)",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Score a text with both models and print the differences."""
    from shardline.api.model_text import load_model_text
    from shardline.deployment.here import resolve_here
    from shardline.runtime.scoring import compare

    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ValueError(f"--json {args.json}: its folder does not exist")
    config = engine_config(args)
    parallel = config.parallel
    if (parallel.sharing, parallel.pipeline_parallel_size, parallel.data_parallel_size) != (1, 1, 1):
        raise ValueError("evaluate runs on one rank: answers are the same in every layout")
    against = args.against or config.model.model
    reference = dataclasses.replace(config.model, model=against, quantization="none")
    if args.against is not None:
        reference = dataclasses.replace(reference, load_format="auto")
    plain = dataclasses.replace(config, model=reference, cache=dataclasses.replace(config.cache, kv_cache_dtype="auto"))
    documents = _documents(plain, load_model_text(plain), args.text)
    deployment = resolve_here(config)
    quality = compare(deployment, resolve_here(plain), documents)
    scheme = config.model.quantization or str(deployment.model.stored) or "none"
    if config.cache.kv_cache_dtype != "auto":
        scheme += f" with KV in {config.cache.kv_cache_dtype}"
    print("\n".join(_lines(scheme, args.against or "the model as it is", quality)))
    if args.json is not None:
        args.json.write_text(json.dumps(dataclasses.asdict(quality), indent=2) + "\n", encoding="utf-8")
    return 0


def _documents(config: EngineConfig, text: ModelText, path: Path | None) -> list[Document]:
    """The text, cut into windows. Without a text, the demo model's conversations; their answers are scored."""
    from shardline.runtime.scoring import Document

    if text.tokenizer is None:
        raise ValueError(f"{config.model.model} has no tokenizer, and evaluate scores text")
    if path is not None:
        try:
            ids = text.tokenizer.encode_text(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--text: cannot read {path}: {error}") from error
        windows = [ids[start : start + _WINDOW] for start in range(0, len(ids), _WINDOW)]
        documents = [Document(window, 1) for window in windows if len(window) > 1]
        if not documents:
            raise ValueError(f"{path} is too short: it must have at least two tokens")
        return documents
    if config.model.model != "demo":
        raise ValueError("give a text to score with --text FILE; only the demo model has a text of its own")
    return _conversations(text)


def _conversations(text: ModelText) -> list[Document]:
    from shardline.checkpoints.hub import DEMO_FOLDER
    from shardline.runtime.scoring import Document
    from shardline.text.chat_template import Conversation, render_and_encode

    assert text.tokenizer is not None
    assert text.chat_template is not None
    documents = []
    for line in (DEMO_FOLDER / "conversations.jsonl").read_text(encoding="utf-8").splitlines():
        known = json.loads(line)
        question = {"role": "user", "content": known["question"]}
        answer = {"role": "assistant", "content": known["answer"]}
        answered = Conversation([question, answer], add_generation_prompt=False)
        _, prompt_ids = render_and_encode(text.chat_template, text.tokenizer, Conversation([question]))
        _, ids = render_and_encode(text.chat_template, text.tokenizer, answered)
        documents.append(Document(ids, len(prompt_ids)))
    return documents


def _lines(scheme: str, against: str, quality: Quality) -> list[str]:
    return [
        f"{scheme} against {against}, over {quality.num_tokens} tokens",
        f"perplexity             {quality.perplexity:.4f} against {quality.reference_perplexity:.4f}",
        f"top-1 agreement        {100 * quality.top1_agreement:.2f}%",
        f"logprob difference     mean {quality.mean_difference:.4f}, max {quality.max_difference:.4f}",
        f"KL divergence          mean {quality.kl_divergence:.5f}",
    ]
