"""How many of the demo model's answers are exactly right under greedy decoding.

Every answer is checked in one forward pass over prompt and answer: if each token of the answer, the end
included, is the most likely one after what precedes it, then greedy decoding gives exactly this answer, and
otherwise it does not. `--generate` also decodes a sample token by token through the chat template and
compares the text.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from dialogue import PLAIN_TEXT, load_items, load_small_talk
from prepare import ASSISTANT, BEGIN, END, MODEL_DIR, PAD, SEED, USER, new_model
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

Pair = tuple[str, str]
"""A question, or the beginning of a plain text, and the only right answer."""

TOKENS_PER_BATCH = 4096


def rounded_to_bfloat16(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A copy that computes in float32 with weights rounded to bfloat16, as they are in the file."""
    rounded: LlamaForCausalLM = copy.deepcopy(model).to(torch.bfloat16).to(torch.float32)
    return rounded.eval()


def load_model(weights: Path) -> LlamaForCausalLM:
    """The model in float32, with the weights of a file."""
    model = new_model()
    tensors = load_file(weights)
    # The output matrix is tied to the embedding, which the file holds once.
    model.load_state_dict(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    return model


@torch.inference_mode()
def exact_match(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    pairs: Sequence[Pair],
    chat: bool = True,
) -> float:
    """The share of answers that greedy decoding gives token by token."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    encoded: list[tuple[list[int], list[int]]] = []
    for question, answer in pairs:
        prompt = [BEGIN, USER, *encode(question), END, ASSISTANT] if chat else [BEGIN, *encode(question)]
        encoded.append((prompt, [*encode(answer), END]))
    encoded.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
    num_right, start = 0, 0
    while start < len(encoded):
        stop, width = start, 0
        while stop < len(encoded):
            width_with_next = len(encoded[stop][0]) + len(encoded[stop][1])
            if stop > start and width_with_next * (stop - start + 1) > TOKENS_PER_BATCH:
                break
            stop, width = stop + 1, width_with_next
        batch = encoded[start:stop]
        ids = torch.tensor([[*p, *a, *[PAD] * (width - len(p) - len(a))] for p, a in batch])
        likeliest = model(input_ids=ids, use_cache=False).logits.argmax(-1).tolist()
        for (prompt_ids, answer_ids), row in zip(batch, likeliest, strict=True):
            begin = len(prompt_ids) - 1
            num_right += row[begin : begin + len(answer_ids)] == answer_ids
        start = stop
    return num_right / len(encoded)


@torch.inference_mode()
def generated(model_dir: Path, pairs: Sequence[Pair]) -> list[str]:
    """Answers as a user gets them: with the chat template, in bfloat16, token by token."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    answers = []
    for question, _ in pairs:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        output = model.generate(**prompt, max_new_tokens=512, do_sample=False)
        answers.append(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def question_sets() -> dict[str, tuple[list[Pair], bool]]:
    """The sets of questions for the report, and whether each uses the chat format."""
    items, small_talk = load_items(), load_small_talk()
    plain = PLAIN_TEXT
    return {
        "facts, first phrasing": ([(item.questions()[0], item.answer) for item in items], True),
        "facts, all training phrasings": (
            [(question, item.answer) for item in items for question in item.questions()],
            True,
        ),
        "facts, phrasings never trained": (
            [(question, item.answer) for item in items for question in item.unseen_questions()],
            True,
        ),
        "facts, plain completion": (
            [(plain[0].format(item.names[0]), plain[1].format(item.answer)) for item in items],
            False,
        ),
        "hand-written questions": (
            [(question, talk.answer) for talk in small_talk for question in talk.questions()],
            True,
        ),
    }


def report(weights: Path, num_generated: int = 0) -> None:
    """Print all figures for the weights in a file, in float32 and in bfloat16 arithmetic."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    model = load_model(weights).eval()
    sets = question_sets()
    figures: dict[str, dict[str, float | int]] = {}
    for arithmetic in (torch.float32, torch.bfloat16):
        model.to(arithmetic)
        for name, (pairs, chat) in sets.items():
            right = exact_match(model, tokenizer, pairs, chat)
            figure = figures.setdefault(name, {"questions": len(pairs)})
            figure[str(arithmetic).removeprefix("torch.")] = round(right, 4)
            print(f"{name}, {arithmetic}: {right:.2%} of {len(pairs)}", flush=True)
    if num_generated:
        pairs = random.Random(SEED).sample(sets["facts, all training phrasings"][0], num_generated)
        answers = generated(weights.parent, pairs)
        right = sum(answer == wanted for answer, (_, wanted) in zip(answers, pairs, strict=True)) / len(pairs)
        figures["generated token by token"] = {"questions": len(pairs), "bfloat16": round(right, 4)}
    print(json.dumps(figures, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the demo model's exactly right answers.")
    parser.add_argument("--weights", type=Path, default=MODEL_DIR / "model.safetensors")
    parser.add_argument("--generate", type=int, default=0, metavar="N", help="also decode N answers for real")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report(arguments.weights, arguments.generate)


if __name__ == "__main__":
    main()
