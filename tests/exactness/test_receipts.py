"""Receipts of answers from every layout: one rank verifies them, and so does any other layout.

The matrix shows that tokens and digests are those of one rank, and receipts are made of nothing else that runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardline.deployment.fingerprint import NumericContract
from shardline.engine.engine import Engine
from shardline.messages.request import Constraints, Request
from shardline.receipts.check import Verdict, check_output
from shardline.receipts.receipt import Receipt, make_receipt
from tests.exactness.harness import make_requests, run, start_engine
from tests.models.checkpoints import make_checkpoint

CONTRACT = NumericContract("any")
SHAPES: dict[str, dict[str, Any]] = {"gemma2": {"sliding_window": 24}}


def requests_of(count: int = 8) -> list[Request]:
    """Those of the matrix, some with constraints."""
    requests = make_requests(256, count)
    requests[1] = msgspec.structs.replace(requests[1], constraints=Constraints("", tuple(range(5, 250, 3)), ((6, 9),)))
    return requests


def receipts_of(engine: Engine, requests: list[Request]) -> list[Receipt]:
    answers = run(engine, requests, "joining")
    return [
        make_receipt(CONTRACT, one, answers[one.request_id].token_ids, answers[one.request_id].digests)
        for one in requests
    ]


def verify(engine: Engine, receipts: list[Receipt]) -> list[Verdict]:
    requests = [receipt.request(f"v{number}", 0.0) for number, receipt in enumerate(receipts)]
    answers = run(engine, requests, "together")
    found = [answers[request.request_id] for request in requests]
    return [check_output(one, got.token_ids, got.digests) for one, got in zip(receipts, found, strict=True)]


@pytest.mark.parametrize(
    ("family", "layout", "options"),
    [
        ("llama", {"tensor": 3}, {"max_num_batched_tokens": 13, "dtype": "bfloat16"}),
        ("llama", {"pipeline": 2}, {"kv_cache_dtype": "int8", "quantization": "int8"}),
        (
            "gemma2",
            {"tensor": 2, "pipeline": 2},
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        ),
        ("qwen3_moe", {"tensor": 2}, {"num_gpu_blocks_override": 12, "max_model_len": 100}),
        ("qwen3_moe", {"tensor": 2, "lockstep": 2}, {"enable_expert_parallel": True, "max_num_batched_tokens": 20}),
        ("deepseek_v3", {"tensor": 2}, {"enable_prefix_caching": False}),
    ],
)
def test_one_rank_verifies_what_any_layout_made_and_any_layout_what_it_made(
    family: str, layout: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    model = make_checkpoint(family, tmp_path, **SHAPES.get(family, {}))
    alike = {name: options[name] for name in ("dtype", "kv_cache_dtype", "quantization") if name in options}
    many, executors = start_engine(model, **layout, **options)
    one, executor = start_engine(model, **alike)
    made = receipts_of(many, requests_of())
    steps = one.stats().num_steps
    assert [str(verdict) for verdict in verify(one, made) if not verdict.equal] == []
    num_tokens = sum(len(receipt.output_token_ids) for receipt in made)
    constrained = max(len(receipt.output_token_ids) for receipt in made if receipt.constraints is not None)
    assert one.stats().num_steps - steps < constrained + 12 < num_tokens / 2
    assert [str(verdict) for verdict in verify(many, receipts_of(one, requests_of(4))) if not verdict.equal] == []
    for engine, own in ((many, executors), (one, executor)):
        assert engine.stats().kv_blocks_used == 0
        engine.close()
        own.close()


def test_what_was_changed_is_found(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path)
    engine, executor = start_engine(model)
    greedy, sampled = receipts_of(engine, requests_of(2)[:1] + make_requests(256, 3)[2:])
    count = len(sampled.output_token_ids)

    def changed(receipt: Receipt, **fields: Any) -> Receipt:
        return msgspec.structs.replace(receipt, **fields)

    def with_token(receipt: Receipt, place: int) -> Receipt:
        tokens = list(receipt.output_token_ids)
        tokens[place] ^= 1
        return changed(receipt, output_token_ids=tokens)

    found = verify(
        engine,
        [
            with_token(greedy, 0),
            with_token(sampled, count - 1),
            with_token(sampled, 4),
            changed(sampled, sampling={**sampled.sampling, "top_k": 1}),
            changed(sampled, seed="13"),
            changed(sampled, choice=sampled.choice + 1),
            changed(sampled, prompt_token_ids=[*sampled.prompt_token_ids[:-1], 7]),
            changed(sampled, sampling={**sampled.sampling, "frequency_penalty": 1.9}),
            changed(greedy, sampling={**greedy.sampling, "temperature": 2.0}),
            changed(sampled, output_token_ids=sampled.output_token_ids[:5], digests=sampled.digests[:5]),
        ],
    )
    assert not any(verdict.equal for verdict in found)
    assert [verdict.position for verdict in found[:3]] == [0, count - 1, 4]
    logits_differ = [verdict.position_digest != verdict.own_position_digest for verdict in found]
    assert logits_differ == [False] * 6 + [True] + [False] * 3
    assert found[-1].position is None, "the tokens that are left are right"
    executor.close()


@pytest.mark.parametrize(
    "other", [{"kv_cache_dtype": "int8"}, {"quantization": "int8"}, {"dtype": "bfloat16"}, {"model": 1}]
)
def test_other_weights_and_dtypes_have_other_logits_from_the_first_tokens_on(
    other: dict[str, Any], tmp_path: Path
) -> None:
    """If somebody writes another contract into a receipt, the digests still tell."""
    engine, executor = start_engine(make_checkpoint("llama", tmp_path / "model"))
    made = receipts_of(engine, requests_of(3))
    executor.close()
    options = {name: value for name, value in other.items() if name != "model"}
    changes: dict[str, Any] = {"rope_theta": 9999.0} if "model" in other else {}
    model = make_checkpoint("llama", tmp_path / "other", **changes)
    engine, executor = start_engine(model, **options)
    for verdict in verify(engine, made):
        assert (verdict.equal, verdict.position) == (False, 0)
        assert verdict.position_digest != verdict.own_position_digest
    executor.close()
