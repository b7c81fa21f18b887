"""What a draft model gains on ranks of its own, and on those of the model: `python perf/draft_ranks.py`.

The model has random weights and 16 layers, of which all but the first two change little; these two are the draft model.
So it guesses as often right as the damping lets it, and nothing is replaced. Three engines on the same cores take
turns: without drafts, with the draft model on the model's rank, and with a rank of its own. Prints the tokens/s without
drafts, how many times as fast the others are, as the median of the rounds with the least and the most, and how many of
their guesses were right.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from shardline import LLM, SamplingParams

PROMPT_LEN, OUTPUT_LEN, VOCAB_SIZE = 64, 128, 4096


def make_pair(folder: Path, damping: float) -> tuple[Path, Path]:
    """A model and its draft model; `damping`: of what the later layers add."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}
    sizes |= {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 2048}
    model = Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=16, **sizes)).bfloat16()
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight.mul_(damping)
            layer.mlp.down_proj.weight.mul_(damping)
        model.lm_head.weight.mul_(4)
    draft = Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=2, **sizes)).bfloat16()
    draft.load_state_dict({name: model.state_dict()[name] for name in draft.state_dict()})
    model.save_pretrained(folder / "model")
    draft.save_pretrained(folder / "draft")
    return folder / "model", folder / "draft"


def acceptance(llm: LLM) -> str:
    """The share of guesses that were right so far."""
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    drafted = counts["vllm:spec_decode_num_draft_tokens"]
    return f"{counts['vllm:spec_decode_num_accepted_tokens'] / max(1, drafted):.0%} of {drafted}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="sequences at once")
    parser.add_argument("--damping", type=float, default=0.04, help="of the later layers; less: more guesses are right")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    dice = random.Random(1)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        model, draft = make_pair(Path(name), asked.damping)
        usual: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory": "512MiB", "skip_tokenizer_init": True}
        drafting = {"model": str(draft), "num_speculative_tokens": 5}
        engines = {
            how: stack.enter_context(closing(LLM(str(model), speculative_config=config, **usual)))
            for how, config in {
                "none": None,
                "on the model's rank": drafting,
                "on a rank of its own": {**drafting, "draft_ranks": 1},
            }.items()
        }
        sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True, detokenize=False)
        for count in asked.batches:
            seconds: dict[str, list[float]] = {how: [] for how in engines}
            for turn in range(1 + asked.rounds):
                prompts = [
                    {"prompt_token_ids": [dice.randrange(VOCAB_SIZE) for _ in range(PROMPT_LEN)]} for _ in range(count)
                ]
                answers = []
                for how, llm in engines.items():
                    started = time.perf_counter()
                    outputs = llm.generate(prompts, sampling, use_tqdm=False)  # type: ignore[arg-type]
                    if turn:  # the first one is slow: steps are recorded
                        seconds[how].append(time.perf_counter() - started)
                    answers.append([output.outputs[0].token_ids for output in outputs])
                assert answers[0] == answers[1] == answers[2], "drafts have changed an answer"
            speed = count * OUTPUT_LEN / statistics.median(seconds["none"])
            print(f"{count} sequences: {speed:.1f} tok/s without drafts")
            for how in list(engines)[1:]:
                ratios = [plain / own for plain, own in zip(seconds["none"], seconds[how], strict=True)]
                print(
                    f"  {how}: {statistics.median(ratios):.2f} x [{min(ratios):.2f}-{max(ratios):.2f}], "
                    f"{acceptance(engines[how])} guesses right so far"
                )


if __name__ == "__main__":
    main()
