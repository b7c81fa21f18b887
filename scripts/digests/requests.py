"""The requests of a case, and the record of their answers."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.digests.cases import Case
from scripts.digests.engines import RunningEngine, start_engine

VOCAB_SIZE = 256
Record = dict[str, Any]

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11, "logprobs": 3},
    {"temperature": 0.8, "seed": 12, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {5: 2.0}},
    {"temperature": 1.3, "seed": -3, "min_p": 0.05, "frequency_penalty": 0.7, "presence_penalty": 0.2},
]


def _batch(lengths: Sequence[int], max_tokens: int, samplings: Sequence[dict[str, Any]] = SAMPLINGS) -> list[Any]:
    """Requests with prompts of these lengths. Pairs of prompts share a prefix, and the samplings take turns."""
    from shardline import SamplingParams
    from shardline.messages.request import Request

    rng = random.Random(7)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(max(lengths))]
    requests = []
    for index, length in enumerate(lengths):
        prompt = shared[: length // 2] if index % 2 else []
        prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(length - len(prompt))]
        sampling = {"max_tokens": max_tokens, "logits_digest": True, **samplings[index % len(samplings)]}
        requests.append(
            Request(
                request_id=f"r{index}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(**sampling),
                choice=index % 3,
                eos_token_ids=(3,),
            )
        )
    return requests


_NO_DIGEST: list[dict[str, Any]] = [{"temperature": 0.0, "logits_digest": False}]
"""Greedy requests without a digest. In such steps the engine computes only the best column of the logits."""

REQUESTS: dict[str, Callable[[], list[list[Any]]]] = {
    "mixed": lambda: [_batch([10, 37, 23, 52, 61, 5, 120, 18], 16), _batch([12, 30], 12, _NO_DIGEST)],
    "short": lambda: [_batch([7, 20, 24, 13, 11], 10), _batch([12, 22], 8, _NO_DIGEST)],
    "long": lambda: [_batch([700, 560, 40], 8), _batch([530], 6, _NO_DIGEST)],
    "few": lambda: [_batch([18, 7, 5], 3), _batch([9], 3, _NO_DIGEST)],
    "rows": lambda: [_batch([70], 2), _batch([66], 2, _NO_DIGEST)],
}
"""Batches by name. A batch starts when the batch before it has ended."""


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _answer(outputs: Sequence[Any], finish_reason: str | None) -> Record:
    """The record of one request. Each of `outputs` is of some of its steps: the engine's, or what users read."""
    digests = [digest for output in outputs for digest in output.digests or []]
    logprobs = [
        (one.logprob, one.rank, list(one.top_ids), list(one.top_logprobs))
        for output in outputs
        for one in getattr(output, "token_logprobs", output.logprobs) or []
    ]
    return {
        "tokens": " ".join(str(token) for output in outputs for token in output.token_ids),
        "digests": digests and [digests[0][:16], _hash(digests)],
        "logprobs": logprobs and _hash(logprobs),
        "finish": finish_reason,
    }


def run_batch(engine: RunningEngine, requests: Sequence[Any]) -> dict[str, Record]:
    """Run all requests together, to their end."""
    outputs: dict[str, list[Any]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.is_busy():
        for output in engine.step():
            assert not output.error, output.error
            outputs[output.request_id].append(output)
    return {
        request_id: _answer(parts, next((part.finish_reason for part in parts if part.finish_reason), None))
        for request_id, parts in outputs.items()
    }


def run_case(case: Case, folder: Path) -> Record:
    """The record of a case. A refused configuration is recorded as refused."""
    defaults = {"cpu_threads": 1, "max_num_batched_tokens": 24, "step_timeout": 120.0}
    room = {"kv_cache_memory": 32 << 20, "device": "cpu"}
    executor = {"distributed_executor_backend": "uni"}
    options = {"model": str(folder / case.checkpoint), **defaults, **room, **executor, **case.options}
    batches = REQUESTS[case.requests]()
    if case.group == "llm":
        return _run_llm(options, batches)
    try:
        engine = start_engine(options)
    except ValueError as error:
        print(f"refused: {case.name}: {error}", file=sys.stderr)
        return {"refused": True}
    try:
        return {f"batch{number}": run_batch(engine, batch) for number, batch in enumerate(batches)}
    finally:
        engine.close()


def _run_llm(options: dict[str, Any], batches: Sequence[Sequence[Any]]) -> Record:
    """Run the case with the public class, which starts processes. This records the system fingerprint too."""
    from shardline import LLM

    options = {**options, "distributed_executor_backend": "auto"}
    with LLM(**options) as llm:
        record: Record = {"fingerprint": llm.fingerprint}
        for number, batch in enumerate(batches):
            prompts: list[Any] = [{"prompt_token_ids": request.prompt_token_ids} for request in batch]
            outputs = llm.generate(prompts, [request.sampling for request in batch], use_tqdm=False)
            record[f"batch{number}"] = {
                f"r{index}": _answer(output.outputs, output.outputs[0].finish_reason)
                for index, output in enumerate(outputs)
            }
    return record
