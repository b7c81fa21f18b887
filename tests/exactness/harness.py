"""Runs the same requests under a layout and schedule, and says what came out: tokens and digests of fp32 logits."""

from __future__ import annotations

import random
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from shardline.checkpoints.adapters import read_adapter
from shardline.checkpoints.description import read_model
from shardline.config.engine import EngineConfig, ModelConfig
from shardline.deployment.deployment import Deployment
from shardline.deployment.here import resolve_here
from shardline.engine.engine import Engine
from shardline.engine.executor import make_executor
from shardline.engine.executor.base import Executor
from shardline.engine.speculative.model import ModelProposer
from shardline.engine.speculative.ngram import PromptLookup
from shardline.engine.speculative.payoff import Gate, RowCost
from shardline.engine.speculative.suffix import SuffixLookup
from shardline.engine.speculative.text_proposer import Lookup
from shardline.messages.request import AdapterRef, Request
from shardline.messages.stats import EngineStats
from shardline.messages.step import SequenceResult
from shardline.models.kv_blocks import blocks_per_request
from shardline.models.sharding import Spans
from shardline.runtime.features.base import RunningStep
from shardline.runtime.features.draft_model import DraftModel
from shardline.runtime.loader.weights import CheckpointWeights
from shardline.runtime.machines.host.replay import DecodeReplay
from shardline.sampling_params import SamplingParams
from shardline.watermark.keys import KGWKey, SynthIDKey, WatermarkKey
from shardline.weights.base import FormatChoice
from shardline.weights.grouped import GroupedWeight
from tests.exactness.cases import (
    DRAFTS,
    EAGLE3_DRAFTS,
    HEAD_DRAFTS,
    KGW,
    MODEL_DRAFTS,
    MTP_DRAFTS,
    NO_DRAFTS,
    NO_MARK,
    PACKED,
    SUFFIX_DRAFTS,
    SYNTHID,
    WHOLE_EXPERTS,
    Case,
)
from tests.exactness.stored import STORED
from tests.models.checkpoints import make_checkpoint
from tests.models.heads import make_eagle, make_eagle3
from tests.weights.forms import FORMS, quantize

_GET = CheckpointWeights.get

MARKS: dict[str, tuple[WatermarkKey, ...]] = {
    NO_MARK: (),
    KGW: (KGWKey(hashing_key=15485863),),
    SYNTHID: (SynthIDKey(keys=tuple(range(100, 2000, 95)), ngram_len=3, context_history_size=9),),
}
"""The engine's key in each case. Few contexts are remembered, so that some are forgotten."""

BLOCK_SIZE = 16
"""The smallest, so that short prompts cross block bounds."""


@dataclass
class Answer:
    """What a request got."""

    token_ids: list[int]
    digests: list[str]
    finish_reason: str


def make_requests(vocab_size: int, count: int = 8, seed: int = 7) -> list[Request]:
    """Prompts of unlike lengths, some with a common prefix; greedy, seeded and penalised sampling."""
    rng = random.Random(seed)
    shared = [rng.randrange(vocab_size) for _ in range(23)]
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 11},
        {"temperature": 0.8, "seed": 12, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {5: 2.0}},
        {"temperature": 1.3, "seed": -3, "min_p": 0.05, "frequency_penalty": 0.7, "presence_penalty": 0.2},
        {"temperature": 0.0, "min_tokens": 4},
    ]
    requests = []
    for index in range(count):
        tail = [rng.randrange(vocab_size) for _ in range(rng.choice([1, 5, 14, 30]))]
        prompt = shared + tail if index % 2 else tail + [rng.randrange(vocab_size) for _ in range(9)]
        params = SamplingParams(
            max_tokens=rng.choice([10, 20, 30]),
            logits_digest=True,
            **samplings[index % len(samplings)],
        )
        requests.append(
            Request(
                request_id=f"r{index}",
                prompt_token_ids=prompt,
                sampling=params,
                choice=index % 3,
                eos_token_ids=(3,),
            )
        )
    return requests


def make_long_requests(vocab_size: int, lengths: Sequence[int]) -> list[Request]:
    """As `make_requests`, with prompts of these lengths; the first halves of all prompts begin alike."""
    rng = random.Random(11)
    shared = [rng.randrange(vocab_size) for _ in range(max(lengths))]
    return [
        msgspec.structs.replace(
            request, prompt_token_ids=shared[: length // 2] + [rng.randrange(vocab_size) for _ in range(length // 2)]
        )
        for request, length in zip(make_requests(vocab_size, len(lengths)), lengths, strict=True)
    ]


def marked(requests: Sequence[Request], mark: str) -> list[Request]:
    """The requests, most of which ask for a mark, unless the case has none."""
    if not MARKS[mark]:
        return list(requests)
    return [
        msgspec.structs.replace(
            request, sampling=msgspec.structs.replace(request.sampling, watermarking=True if index % 4 else None)
        )
        for index, request in enumerate(requests)
    ]


LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 32}


def adapted(requests: Sequence[Request], adapters: Sequence[AdapterRef | None]) -> list[Request]:
    """The requests, which have the adapters in turns."""
    refs = [adapters[index % len(adapters)] for index in range(len(requests))]
    return [
        msgspec.structs.replace(request, adapter=ref, cache_salt=ref.digest if ref else "")
        for request, ref in zip(requests, refs, strict=True)
    ]


def refer(model: Path, folder: Path) -> AdapterRef:
    """The adapter in a folder, as requests name it."""
    spec = read_model(ModelConfig(model=str(model))).spec()
    return AdapterRef(read_adapter(folder, spec, LORA["max_lora_rank"]).digest(), str(folder))


def start_engine(
    model: Path,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
    lockstep: int = 1,
    hosts: str = "one-host",
    mark: str = NO_MARK,
    namespace: bytes | None = None,
    **options: object,
) -> tuple[Engine, Executor]:
    """An engine whose ranks are threads (one rank: none), and the executor to close; `lockstep`: replicas in it;
    `hosts` and `mark`: as in `Case`; `namespace`: as in `Engine`."""
    scheme = options.get("quantization")
    is_packed = str(scheme).startswith(PACKED)
    if is_packed:
        options = {**options, "quantization": "none"}
    elif scheme in STORED:
        options = {**options, "quantization": STORED[scheme].quantization}
    config = EngineConfig.from_options(
        model=str(model),
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        context_parallel_size=context,
        data_parallel_size=lockstep,
        distributed_executor_backend="uni" if tensor * pipeline * context * lockstep == 1 else "threads",
        cpu_threads=1,
        step_timeout=120.0,
        block_size=BLOCK_SIZE,
        **options,
    )
    setup = msgspec.structs.replace(_spread(resolve_here(config), hosts), watermark=MARKS[mark])
    quantized: AbstractContextManager[object] = nullcontext()
    if is_packed:
        setup = msgspec.structs.replace(setup, weight_format=FormatChoice("packed"))
        quantized = patch.multiple(
            CheckpointWeights, get_packed=partialmethod(_read_packed, scheme), get=partialmethod(_read_dense, scheme)
        )
    executor = make_executor(setup)
    with quantized:
        executor.start()
    return Engine(setup, executor, namespace), executor


def _read_packed(source: CheckpointWeights, scheme: object, name: str, spans: Spans) -> GroupedWeight:
    """The part of a weight in a form; with `PACKED`, each block of layers has another one. Experts share theirs."""
    block, _, expert = name.partition(".experts.")
    number = zlib.crc32((block if expert else name.rsplit(".", 2)[0]).encode())
    form = tuple(FORMS)[number % len(FORMS)] if scheme == PACKED else str(scheme).removeprefix(f"{PACKED}-")
    return quantize(_GET(source, name, spans), form)


def _read_dense(source: CheckpointWeights, scheme: object, name: str, spans: Spans) -> torch.Tensor:
    """The part of a weight; an embedding that is packed too, as the lm_head, has the values of its codes."""
    dense = _GET(source, name, spans)
    if name != "embed.weight" or not source._spec.tied_embeddings:
        return dense
    return _read_packed(source, scheme, name, spans).dequantize(dense.dtype)


def _spread(setup: Deployment, hosts: str) -> Deployment:
    """The deployment with its ranks on two hosts, if `hosts` says so."""
    places = setup.placements[0]
    num_first = len(places) if hosts == "one-host" else -(-len(places) // 2)
    host_of = {rank: rank % 2 if hosts == "in-turns" else int(rank >= num_first) for rank in range(len(places))}
    spread = tuple(msgspec.structs.replace(place, host=host_of[rank]) for rank, place in enumerate(places))
    return msgspec.structs.replace(setup, placements=(spread, *setup.placements[1:]))


def run(engine: Engine, requests: Sequence[Request], batch: str) -> dict[str, Answer]:
    """All requests to their end, joining as `batch` says."""
    answers = {request.request_id: Answer([], [], "") for request in requests}
    waiting = list(requests)
    rng = random.Random(3)

    def take() -> None:
        if not waiting:
            return
        if batch == "together":
            for request in waiting:
                engine.add_request(request)
            waiting.clear()
        elif batch == "alone":
            if not engine.busy:
                engine.add_request(waiting.pop(0))
        elif not engine.busy or rng.random() < 0.5:
            engine.add_request(waiting.pop(rng.randrange(len(waiting))))

    take()
    while engine.busy or waiting:
        for output in engine.step():
            answer = answers[output.request_id]
            answer.token_ids += output.token_ids
            answer.digests += output.digests or []
            answer.finish_reason = output.finish_reason or answer.finish_reason
            assert not output.error, output.error
        take()
    return answers


def golden(
    model: Path,
    dtype: str,
    quantization: str,
    kv: str,
    requests: Sequence[Request],
    mark: str = NO_MARK,
    kernels: str = "auto",
) -> dict[str, Answer]:
    """One process, one rank, one request after another, nothing cached, nothing replayed, prompts whole."""
    lora = LORA if any(request.adapter for request in requests) else {}
    with patch.object(DecodeReplay, "__call__", lambda replay, step, hidden: replay.forward(step, hidden)):
        engine, executor = start_engine(
            model,
            **lora,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv,
            enable_prefix_caching=False,
            mark=mark,
            kernels=kernels,
        )
        answers = run(engine, requests, "alone")
        engine.close()
        executor.close()
    return answers


class Guesses:
    """Drafts of known answers, in which some tokens are wrong; stands in for a lookup's `find_continuation`."""

    def __init__(self, requests: Sequence[Request], expected: Mapping[str, Answer]) -> None:
        self._texts = [one.prompt_token_ids + expected[one.request_id].token_ids for one in requests]

    def guess(self, _: Lookup | None, tokens: Sequence[int], most: int) -> list[int]:
        """The next tokens of the answer that begins with `tokens`; none if it ends before they do."""
        known = list(tokens)
        text = next(text for text in self._texts if text[: len(known)] == known[: len(text)])
        guesses = text[len(known) : len(known) + most]
        wrong = len(known) % 7
        if wrong < len(guesses):
            guesses[wrong] += 1 if guesses[wrong] == 0 else -1
        return guesses


def _known_continuation(
    lookup: Lookup,
    find: Callable[[Lookup, Sequence[int], int], list[int]],
    guesses: Guesses,
    tokens: Sequence[int],
    most: int,
) -> list[int]:
    """As `Lookup.find_continuation`, whose search runs too: random answers have few repetitions to find."""
    find(lookup, tokens, most)
    return guesses.guess(lookup, tokens, most)


def _known_guesses(
    draft: DraftModel,
    result: Callable[[DraftModel, RunningStep, list[SequenceResult]], list[SequenceResult]],
    guesses: Guesses,
    running: RunningStep,
    results: list[SequenceResult],
) -> list[SequenceResult]:
    """As `DraftModel.result`, with as many guesses of the answers in place of those of the draft model, which computes
    them and is random."""
    tokens = {
        step.seq_id: sequence.tokens[: step.start + step.num_tokens - len(step.draft_token_ids)].tolist()
        for step, sequence in zip(running.plan.steps, running.stepped, strict=True)
    }
    return [
        msgspec.structs.replace(one, guesses=guesses.guess(None, tokens[one.seq_id] + one.token_ids, len(one.guesses)))
        if one.guesses
        else one
        for one in result(draft, running, results)
    ]


@contextmanager
def drafts_allowed() -> Iterator[None]:
    """Whatever steps take, and whatever a draft model has to compute first."""
    with (
        patch.object(Gate, "is_open", True),
        patch.object(RowCost, "is_known", True),
        patch.object(RowCost, "share_of_row", lambda *_: 0.01),
        patch.object(ModelProposer, "_late_tokens_pay", lambda *_: True),
    ):
        yield


def run_case(
    model: Path,
    case: Case,
    requests: Sequence[Request],
    expected: Mapping[str, Answer],
    chunk: int = 13,
    kernels: str = "auto",
) -> tuple[dict[str, Answer], list[EngineStats]]:
    """The requests under a case, and each engine's counters. Drafts are those of `expected`; `chunk`: tokens of a step
    if prompts are chunked."""
    if case.drafts == NO_DRAFTS:
        return _run_case(model, case, requests, {"kernels": kernels}, chunk)
    guesses = Guesses(requests, expected)
    if case.drafts in _LOOKUPS:
        method, kind = _LOOKUPS[case.drafts]
        found = partialmethod(_known_continuation, kind.find_continuation, guesses)
        with patch.object(kind, "find_continuation", found), drafts_allowed():
            asked: dict[str, Any] = {"method": method, "num_speculative_tokens": 4}
            return _run_case(model, case, requests, {"speculative_config": asked, "kernels": kernels}, chunk)
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(DraftModel, "result", partialmethod(_known_guesses, DraftModel.result, guesses)),
        drafts_allowed(),
    ):
        method, make = _MODELS[case.drafts]
        asked = {"method": method, "num_speculative_tokens": 4}
        if make is not None:
            asked["model"] = str(make(Path(folder)))
        return _run_case(model, case, requests, {"speculative_config": asked, "kernels": kernels}, chunk)


_LOOKUPS: Mapping[str, tuple[str, type[PromptLookup | SuffixLookup]]] = {
    DRAFTS: ("ngram", PromptLookup),
    SUFFIX_DRAFTS: ("suffix", SuffixLookup),
}
"""The methods whose guesses are found in texts, and what finds them."""
_MODELS: Mapping[str, tuple[str, Callable[[Path], Path] | None]] = {
    MODEL_DRAFTS: (
        "draft_model",
        lambda folder: make_checkpoint("qwen2", folder, max_position_embeddings=2048, num_attention_heads=8),
    ),
    HEAD_DRAFTS: ("eagle", make_eagle),
    EAGLE3_DRAFTS: ("eagle3", make_eagle3),
    MTP_DRAFTS: ("mtp", None),
}
"""The methods whose guesses are computed, and what makes a checkpoint that computes them; None: the model's does."""


def _run_case(
    model: Path, case: Case, requests: Sequence[Request], more_options: Mapping[str, object], chunk: int
) -> tuple[dict[str, Answer], list[EngineStats]]:
    max_step_tokens = 2048 if case.prefill == "whole" else chunk
    options: dict[str, object] = {
        "dtype": case.dtype,
        "quantization": case.quantization,
        "kv_cache_dtype": case.kv.removeprefix("kv-"),
        "enable_prefix_caching": case.cache != "off",
        "max_num_batched_tokens": max_step_tokens,
        "enable_expert_parallel": case.experts == WHOLE_EXPERTS,
        **(LORA if case.adapters else {}),
        **more_options,
    }
    answers: dict[str, Answer] = {}
    stats = []
    lockstep = case.data if case.experts == WHOLE_EXPERTS else 1
    num_engines = case.data // lockstep
    for number in range(num_engines):
        share = [request for index, request in enumerate(requests) if index % num_engines == number]
        replica_options: dict[str, Any] = dict(options)
        if case.memory == "tight":
            longest = max(len(request.prompt_token_ids) + (request.sampling.max_tokens or 0) for request in share)
            replica_options["max_model_len"] = longest
            replica_options["num_gpu_blocks_override"] = _tight_pool(model, longest, max_step_tokens, case.context)
        engine, executor = start_engine(
            model,
            tensor=case.tensor,
            pipeline=case.pipeline,
            context=case.context,
            lockstep=lockstep,
            hosts=case.hosts,
            mark=case.mark,
            **replica_options,
        )
        try:
            if case.cache == "warm":
                run(engine, share, case.batch)
            answers |= run(engine, share, case.batch)
            stats.append(engine.stats())
        finally:
            engine.close()
            executor.close()
    return answers, stats


def _tight_pool(model: Path, longest: int, max_step_tokens: int, context: int = 1) -> int:
    """Blocks for one request of `longest` tokens."""
    groups = resolve_here(EngineConfig.from_options(model=str(model))).cache.groups
    return blocks_per_request(groups, longest, BLOCK_SIZE, max_step_tokens, context)
