"""Log likelihoods by transformers: `python -m tests.clients.reference_scores FOLDER < requests.json`.

It runs in the environment of Shardline's own tests. The input is a list of pairs (context, continuation); the output is
for each pair the log likelihood of the continuation, and whether it is the greedy one, as lm_eval counts them.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str) -> None:
    """Score what comes on stdin."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    scores = []
    for context, continuation in json.load(sys.stdin):
        # lm_eval moves the space between both parts to the continuation.
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        whole = tokenizer(stripped + continuation, add_special_tokens=False).input_ids
        num_context = len(tokenizer(stripped, add_special_tokens=False).input_ids)
        with torch.no_grad():
            logits = model(torch.tensor([whole])).logits[0]
        logprobs = logits.log_softmax(-1)[num_context - 1 : -1]
        targets = torch.tensor(whole[num_context:])
        total = logprobs.gather(1, targets[:, None]).sum().item()
        scores.append((total, bool((logprobs.argmax(-1) == targets).all())))
    json.dump(scores, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
