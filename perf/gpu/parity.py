"""Random models of several families against transformers, on the same device and in fp32."""

from __future__ import annotations

import gc
from typing import Any

import torch

from shardline import LLM, SamplingParams

from .families import PROMPTS, random_model
from .inputs import attempt

FAMILIES = ("llama", "mixtral", "deepseek_v3", "cohere2")
_BOUND = 5e-3
"""How far log-probabilities of the chosen tokens may be apart."""


def same_logprobs(model_type: str, on: dict[str, str]) -> dict[str, Any]:
    """Greedy answers, whose tokens transformers then reads at once: its log-probabilities of them, and its choices."""
    import transformers

    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=1)
    with random_model(model_type) as folder:
        with LLM(folder, dtype="float32", max_model_len=512, **on) as llm:
            answers = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
        gc.collect()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(on["device"]).eval()
    furthest, equal, count = 0.0, 0, 0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens, start = list(answer.token_ids), len(prompt["prompt_token_ids"])
        ids = torch.tensor([[*prompt["prompt_token_ids"], *tokens]], device=on["device"])
        with torch.inference_mode():
            theirs = model(ids).logits[0, start - 1 : -1].float().log_softmax(-1).cpu()
        ours = torch.tensor([answer.logprobs[place][token].logprob for place, token in enumerate(tokens)])
        furthest = max(furthest, float((theirs.gather(1, torch.tensor(tokens)[:, None])[:, 0] - ours).abs().max()))
        equal += int((theirs.argmax(1) == torch.tensor(tokens)).sum())
        count += len(tokens)
    return {"ok": furthest < _BOUND, "furthest_logprob": furthest, "equal_choices": equal, "of": count}


def run(on: dict[str, str]) -> dict[str, Any]:
    """All families."""
    return {name: attempt(same_logprobs, name, on) for name in FAMILIES}
