"""Constrained outputs: the same in every layout, batch and schedule, and always of the form that was asked for."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from shardline.deployment.fingerprint import NumericContract
from shardline.engine.masks.lanes import MaskLanes
from shardline.engine.masks.service import MaskAnswer
from shardline.engine.scheduling.queues import SequenceQueues
from shardline.engine.scheduling.sequence import LiveSequence
from shardline.messages.request import Constraints, Request
from shardline.receipts.check import check_output
from shardline.receipts.receipt import make_receipt
from shardline.sampling_params import StructuredOutputsParams
from shardline.structured.grammar import structured_grammar
from tests.exactness.cases import DRAFTS, MODEL_DRAFTS, Case
from tests.exactness.harness import Answer, golden, make_requests, run, run_case, start_engine
from tests.models.checkpoints import make_checkpoint

VOCAB_SIZE = 256
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "ages": {"type": "array", "items": {"enum": [1, 22]}, "maxItems": 2},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any] | None] = [
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"regex": "(ab|c){5,9}d"},
    None,
    {"choice": ["no", "yes, of course", "yes"]},
]
LAYOUTS = [(1, 1), (2, 1), (1, 2), (3, 2)]


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token for each byte, as the checkpoint's vocabulary has 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("constraints") / "llama")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    made = []
    for index, request in enumerate(make_requests(VOCAB_SIZE, 12)):
        form = FORMS[index % len(FORMS)]
        constraints = Constraints(bad_words=((4, 5), (9,)), allowed_token_ids=tuple(range(3, 250)))
        if form is not None:
            constraints = Constraints(structured_grammar(StructuredOutputsParams(**form)))
        sampling = msgspec.structs.replace(request.sampling, max_tokens=60, min_tokens=0)
        made.append(msgspec.structs.replace(request, constraints=constraints, sampling=sampling))
    return made


@pytest.fixture(scope="module")
def expected(model: Path, requests: list[Request]) -> dict[str, Answer]:
    return golden(model, "float32", "none", "auto", requests)


def text_of(answer: Answer) -> str:
    return byte_tokenizer().decode([token for token in answer.token_ids if token != 3])


def test_outputs_have_the_form(requests: list[Request], expected: dict[str, Answer]) -> None:
    for index, request in enumerate(requests):
        answer = expected[request.request_id]
        form = FORMS[index % len(FORMS)]
        if form is None:
            assert 9 not in answer.token_ids
            assert (4, 5) not in set(zip(answer.token_ids, answer.token_ids[1:], strict=False))
            continue
        assert answer.finish_reason == "stop", text_of(answer)
        if "json" in form:
            value = json.loads(text_of(answer))
            assert set(value) == {"name", "ages"}
            assert set(value["ages"]) <= {1, 22}
        elif "choice" in form:
            assert text_of(answer) in form["choice"]  # type: ignore[operator]
        else:
            assert text_of(answer).endswith("d")


@pytest.mark.parametrize(
    ("tensor", "pipeline", "memory"),
    [(*layout, ("tight", "roomy")[number % 2]) for number, layout in enumerate(LAYOUTS)],
)
def test_one_answer(
    model: Path, requests: list[Request], expected: dict[str, Answer], tensor: int, pipeline: int, memory: str
) -> None:
    rest = ("staggered", "chunked", "warm", memory, "none", "split-experts", "kv-auto", "one-host")
    case = Case("llama", "float32", tensor, pipeline, 1, *rest)
    answers, stats = run_case(model, case, requests, expected)
    assert {key: dataclasses.astuple(answer) for key, answer in answers.items()} == {
        key: dataclasses.astuple(answer) for key, answer in expected.items()
    }
    if memory == "tight":
        assert sum(replica.num_preemptions for replica in stats) > 0


@pytest.mark.parametrize(
    ("tensor", "pipeline", "drafts"), [(1, 1, DRAFTS), (2, 2, DRAFTS), (2, 1, MODEL_DRAFTS), (1, 2, MODEL_DRAFTS)]
)
def test_drafts_change_no_answer(
    model: Path,
    requests: list[Request],
    expected: dict[str, Answer],
    tensor: int,
    pipeline: int,
    drafts: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give, foreseen = SequenceQueues.give_mask, [0]

    def give_mask(queues: SequenceQueues, sequence: LiveSequence, allowed: bytes, guesses: list[int]) -> None:
        foreseen.append(len(guesses))
        give(queues, sequence, allowed, guesses)

    monkeypatch.setattr(SequenceQueues, "give_mask", give_mask)
    rest = ("staggered", "chunked", "warm", "roomy", "none", "split-experts", "kv-auto", "one-host")
    case = Case("llama", "float32", tensor, pipeline, 1, *rest, drafts)
    answers, stats = run_case(model, case, requests, expected)
    assert {key: dataclasses.astuple(answer) for key, answer in answers.items()} == {
        key: dataclasses.astuple(answer) for key, answer in expected.items()
    }
    assert max(foreseen) > 1
    counts = [replica.drafts for replica in stats if replica.drafts is not None]
    assert 0 < sum(one.num_accepted for one in counts) < sum(one.num_tokens for one in counts)


def test_receipts_are_verified_several_tokens_a_step(
    model: Path, requests: list[Request], expected: dict[str, Answer]
) -> None:
    """The expected tokens are guesses that the grammar allows."""
    contract = NumericContract("any")
    made = [
        make_receipt(contract, one, expected[one.request_id].token_ids, expected[one.request_id].digests)
        for one in requests
    ]
    engine, executor = start_engine(model, tensor=2)
    for number, receipt in enumerate(made):
        answer = run(engine, [receipt.request("v", 0.0)], "alone")["v"]
        assert check_output(receipt, answer.token_ids, answer.digests).equal, number
    num_tokens = sum(len(receipt.output_token_ids) for receipt in made)
    assert engine.stats().num_steps < num_tokens * 2 / 3, "it would be more than one a token"
    changed = msgspec.structs.replace(made[0], output_token_ids=[*made[0].output_token_ids[:5], 7, 7, 7])
    answer = run(engine, [changed.request("c", 0.0)], "alone")["c"]
    assert not check_output(changed, answer.token_ids, answer.digests).equal
    assert engine.stats().kv_blocks_used == 0
    engine.close()
    executor.close()


@pytest.mark.parametrize(("tensor", "pipeline"), LAYOUTS)
def test_late_masks_change_no_answer(
    model: Path,
    requests: list[Request],
    expected: dict[str, Answer],
    tensor: int,
    pipeline: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sequences leave the batch when their masks are late, and come back; some are preempted meanwhile."""
    collect, dice, kept, held = MaskLanes.collect, random.Random(5), list[tuple[int, MaskAnswer]](), 0

    def collect_late(lanes: MaskLanes, timeout: float) -> list[tuple[int, MaskAnswer]]:
        nonlocal held
        kept.extend(collect(lanes, 0.0 if kept else timeout))
        kept[:] = [answer for answer in kept if answer[0] in lanes._followed]  # others were dropped meanwhile
        dice.shuffle(kept)
        late = kept[: dice.randrange(len(kept) + 1)]
        held += len(kept) - len(late)
        del kept[: len(late)]
        return late

    monkeypatch.setattr(MaskLanes, "collect", collect_late)
    rest = ("staggered", "chunked", "warm", "tight", "none", "split-experts", "kv-auto", "one-host")
    answers, stats = run_case(model, Case("llama", "float32", tensor, pipeline, 1, *rest), requests, expected)
    assert {key: dataclasses.astuple(answer) for key, answer in answers.items()} == {
        key: dataclasses.astuple(answer) for key, answer in expected.items()
    }
    assert held > 100
    assert sum(replica.num_preemptions for replica in stats) > 0
