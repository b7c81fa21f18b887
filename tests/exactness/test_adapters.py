"""A request's answer depends on its adapter, and on nothing else: not on other adapters in its batch, nor on the
layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from shardline.deployment.fingerprint import NumericContract
from shardline.engine.speculative.ngram import PromptLookup
from shardline.messages.request import AdapterRef, Request
from shardline.receipts.check import check_output
from shardline.receipts.receipt import make_receipt
from shardline.runtime.machines.host.replay import DecodeReplay
from tests.exactness.harness import (
    LORA,
    Answer,
    Guesses,
    adapted,
    drafts_allowed,
    make_requests,
    refer,
    run,
    start_engine,
)
from tests.models.adapters import make_adapter
from tests.models.checkpoints import make_checkpoint

ADAPTERS: tuple[tuple[list[str], list[str]], ...] = (
    (["q_proj", "v_proj", "lm_head", "embed_tokens"], []),
    (["o_proj", "gate_proj", "down_proj"], ["embed_tokens"]),
    (["proj", "embed_tokens"], ["lm_head"]),
)
"""What each changes, and has whole. The first two have DoRA."""
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4}


class Setup:
    """A model, requests with three adapters and without one, and their answers, each computed alone."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        quantization: str,
        family: str = "llama",
        kernels: str = "auto",
        count: int = 8,
    ) -> None:
        self.model = make_checkpoint(family, folder / "model", dtype=dtype, max_position_embeddings=1024)
        self.options: dict[str, Any] = {"dtype": dtype, "quantization": quantization, "kernels": kernels}
        self.adapters: list[AdapterRef | None] = [None]
        for number, (targets, whole) in enumerate(ADAPTERS):
            made: dict[str, Any] = {"seed": number, "rank": 3 + 9 * number, "use_dora": number < 2}
            path = make_adapter(self.model, folder / f"{number}", targets=targets, whole=whole, **made)
            self.adapters.append(refer(self.model, path))
        self.requests = adapted(make_requests(256, count), self.adapters)
        with patch.object(DecodeReplay, "__call__", lambda replay, step, hidden: replay.forward(step, hidden)):
            self.expected = self.answers(self.requests, "alone", max_lora_rank=64)

    def answers(self, requests: Sequence[Request], batch: str, **options: Any) -> dict[str, Answer]:
        engine, executor = start_engine(self.model, **{**self.options, **LORA, **options})
        try:
            return run(engine, requests, batch)
        finally:
            engine.close()
            executor.close()


@pytest.fixture(scope="module", params=[("bfloat16", "none"), ("float32", "int8")], ids=["bf16", "fp32-int8"])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("adapters"), *request.param)


def test_adapters_change_the_answers(setup: Setup) -> None:
    one = setup.requests[1]
    found = [setup.answers([msgspec.structs.replace(one, adapter=ref)], "alone") for ref in setup.adapters]
    assert len({answer["r1"].digests[0] for answer in found}) == len(setup.adapters)


@pytest.mark.parametrize(
    ("layout", "batch"),
    [
        ({}, "together"),
        ({"tensor": 2}, "staggered"),
        ({"tensor": 3}, "together"),
        ({"pipeline": 2, "max_num_batched_tokens": 13}, "together"),
        ({"tensor": 2, "pipeline": 2, "hosts": "two-hosts"}, "together"),
        ({"context": 2}, "together"),
        ({"max_loras": 1}, "staggered"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else value,
)
def test_layouts_and_batches(setup: Setup, layout: dict[str, Any], batch: str) -> None:
    assert setup.answers(setup.requests, batch, **layout) == setup.expected


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("experts"), "bfloat16", "int8", "qwen3_moe")


@pytest.mark.parametrize(
    ("layout", "batch"),
    [
        ({}, "together"),
        ({"tensor": 2}, "staggered"),
        ({"tensor": 2, "enable_expert_parallel": True}, "together"),
        ({"tensor": 2, "pipeline": 2, "enable_expert_parallel": True, "max_num_batched_tokens": 13}, "staggered"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else value,
)
def test_adapters_of_experts(experts: Setup, layout: dict[str, Any], batch: str) -> None:
    assert experts.answers(experts.requests, batch, **layout) == experts.expected


def test_adapters_of_experts_that_are_read_from_a_disk(experts: Setup, tmp_path: Path) -> None:
    answers = experts.answers(experts.requests, "together", cpu_offload_gb=100.0, offload_to=str(tmp_path))
    assert answers == experts.expected


def test_adapters_of_experts_that_replicas_share_are_refused(experts: Setup) -> None:
    refs = experts.adapters
    asked = [one for one in experts.requests if one.adapter in (refs[0], refs[2])][:4]
    engine, executor = start_engine(
        experts.model, tensor=1, lockstep=2, enable_expert_parallel=True, **{**experts.options, **LORA}
    )
    for request in asked:
        engine.add_request(request)
    errors: dict[str, str] = {}
    tokens: dict[str, list[int]] = {one.request_id: [] for one in asked if one.adapter is None}
    while engine.busy:
        for output in engine.step():
            if output.error:
                assert output.refused
                errors[output.request_id] = output.error
            else:
                tokens[output.request_id] += output.token_ids
    assert tokens == {name: experts.expected[name].token_ids for name in tokens}
    assert len(tokens) == len(errors) == 2
    assert all("which adapters cannot where experts move (--enable-eplb)" in error for error in errors.values())
    engine.close()
    executor.close()


def test_receipts_name_the_adapter(setup: Setup) -> None:
    engine, executor = start_engine(setup.model, **{**setup.options, **LORA})
    asked = [msgspec.structs.replace(one, prompt_token_ids=[5, 7, 9]) for one in setup.requests[:4]]
    answers = run(engine, asked, "together")
    made = [
        make_receipt(NumericContract("any"), one, got.token_ids, got.digests)
        for one, got in ((one, answers[one.request_id]) for one in asked)
    ]
    assert [receipt.adapter for receipt in made] == [ref.digest if ref else "" for ref in setup.adapters]
    for right in (True, False):
        refs = setup.adapters if right else [None, *setup.adapters[2:], setup.adapters[1]]
        again = [receipt.request(f"v{i}", 0.0, ref) for i, (receipt, ref) in enumerate(zip(made, refs, strict=True))]
        again = [msgspec.structs.replace(one, cache_salt=one.adapter.digest if one.adapter else "") for one in again]
        checked = run(engine, again, "together")
        verdicts = [
            check_output(receipt, checked[f"v{i}"].token_ids, checked[f"v{i}"].digests)
            for i, receipt in enumerate(made)
        ]
        assert [verdict.equal for verdict in verdicts] == [True, right, right, right]
    engine.close()
    executor.close()


def test_preemption_and_cached_prefixes(setup: Setup) -> None:
    few: dict[str, Any] = {"max_model_len": 128, "num_gpu_blocks_override": 12}
    assert setup.answers(setup.requests, "together", **few) == setup.expected
    engine, executor = start_engine(setup.model, **{**setup.options, **LORA})
    for _ in range(2):
        assert run(engine, setup.requests, "together") == setup.expected
    assert engine.stats().prefix_hits > 0
    engine.close()
    executor.close()


def test_drafts(setup: Setup) -> None:
    guesses = Guesses(setup.requests, setup.expected)
    guess = lambda lookup, tokens, most: guesses.guess(lookup, tokens, most)  # noqa: E731
    with patch.object(PromptLookup, "find_continuation", guess):
        check_drafts(setup, speculative_config=DRAFTS)


def check_drafts(setup: Setup, **options: Any) -> None:
    """With drafts, some of which are right and some are wrong, the answers are those without."""
    with drafts_allowed():
        engine, executor = start_engine(setup.model, **{**setup.options, **LORA, **options})
        assert run(engine, setup.requests, "together") == setup.expected
        counts = engine.stats().drafts
        engine.close()
        executor.close()
    assert counts is not None
    assert 0 < counts.num_accepted < counts.num_tokens


def test_a_draft_model_has_no_adapters(setup: Setup) -> None:
    """It guesses what the model would say without them, and the answers are those with them."""
    asked = {"model": str(setup.model), "num_speculative_tokens": 3}
    check_drafts(setup, tensor=2, speculative_config=asked)


def test_requests_without_adapters_are_answered_as_by_an_engine_without(setup: Setup) -> None:
    plain = [request for request in setup.requests if request.adapter is None]
    answers = setup.answers(plain, "together", enable_lora=False)
    assert answers == {request.request_id: setup.expected[request.request_id] for request in plain}


def test_an_adapter_that_is_gone_fails_its_requests_only(setup: Setup, tmp_path: Path) -> None:
    one, known = setup.requests[2], setup.adapters[1]
    assert known is not None
    nowhere, other = AdapterRef("0" * 32, str(tmp_path / "nowhere")), AdapterRef("1" * 32, known.folder)
    lost = msgspec.structs.replace(one, request_id="lost", adapter=nowhere)
    changed = msgspec.structs.replace(one, request_id="changed", adapter=other)
    engine, executor = start_engine(setup.model, tensor=2, **{**setup.options, **LORA})
    for request in (lost, setup.requests[1], changed, setup.requests[0]):
        engine.add_request(request)
    errors: dict[str, str] = {}
    tokens: dict[str, list[int]] = {"r0": [], "r1": []}
    while engine.busy:
        for output in engine.step():
            if output.error:
                assert output.refused
                errors[output.request_id] = output.error
            else:
                tokens[output.request_id] += output.token_ids
    assert tokens == {name: setup.expected[name].token_ids for name in tokens}
    assert "has no adapter_config.json" in errors["lost"]
    assert "has changed since" in errors["changed"]
    assert run(engine, [setup.requests[3]], "alone")["r3"] == setup.expected["r3"]
    engine.close()
    executor.close()
