"""One answer: tokens and fp32-logits digests of every request are equal over the whole matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardline.messages.request import AdapterRef, Request
from tests.exactness.cases import (
    ADAPTERS,
    KGW,
    NO_ADAPTERS,
    NO_DRAFTS,
    NO_MARK,
    SAMPLED_FAMILIES,
    SCHEMES,
    SYNTHID,
    Case,
    full_matrix,
    latent_layouts,
    layouts_of_formats,
    layouts_of_own_parts,
    layouts_with_heads,
    pairwise_sample,
)
from tests.exactness.harness import Answer, adapted, golden, make_requests, marked, refer, run, run_case, start_engine
from tests.exactness.stored import SAMPLED_STORED, STORED
from tests.models.adapters import make_adapter
from tests.models.checkpoints import make_checkpoint
from tests.models.heads import PREDICTING, make_predicting

VOCAB_SIZE = 256


class Goldens:
    """Checkpoint, requests and golden answers of each family, dtype, quantization, KV type, mark and adapters, made
    when asked for."""

    def __init__(self, folder: Path, few: int, many: int) -> None:
        """`few`: requests of a case in which memory is not tight; `many`: in which it is."""
        self._folder, self._few = folder, few
        self._known: dict[tuple[str, ...], dict[str, Answer]] = {}
        self._adapters: dict[Path, list[AdapterRef | None]] = {}
        self.requests = make_requests(VOCAB_SIZE, many)

    def model(self, family: str, quantization: str = "none") -> Path:
        if quantization in STORED:
            return STORED[quantization].make(self._folder / quantization)
        folder, make = self._folder / family, make_predicting if family in PREDICTING else make_checkpoint
        return folder if folder.exists() else make(family, folder, **EXACTNESS_SHAPE.get(family, {}))

    def adapters(self, family: str, quantization: str = "none") -> list[AdapterRef | None]:
        """None, and two, the first of which has DoRA. Checkpoints in a format have those of what they were made of."""
        model = self.model(family, quantization)
        if model not in self._adapters:
            plain = model.with_name("source") if quantization in STORED else model
            found: list[AdapterRef | None] = [None]
            for number, targets in enumerate((_FIRST_TARGETS, _SECOND_TARGETS)):
                if family in _EXPERTS_OF_OWN_FORM:
                    targets = tuple(target for target in targets if target not in _OF_FEED_FORWARD)
                made: dict[str, Any] = {"seed": number, "rank": 3 + 4 * number, "use_dora": not number}
                path = make_adapter(plain, model.with_name(f"{model.name}-adapter-{number}"), targets=targets, **made)
                found.append(refer(model, path))
            self._adapters[model] = found
        return self._adapters[model]

    def requests_of(self, case: Case) -> list[Request]:
        """As many as preempt each other where memory is tight."""
        requests = self._marked_and_adapted(case.family, case.quantization, case.mark, case.adapters)
        return requests if case.memory == "tight" else requests[: self._few]

    def _marked_and_adapted(self, family: str, quantization: str, mark: str, adapters: str) -> list[Request]:
        requests = marked(self.requests, mark)
        return adapted(requests, self.adapters(family, quantization)) if adapters else requests

    def answers(
        self,
        family: str,
        dtype: str,
        quantization: str = "none",
        kv: str = "kv-auto",
        mark: str = NO_MARK,
        adapters: str = NO_ADAPTERS,
        count: int | None = None,
    ) -> dict[str, Answer]:
        """Those of the first `count` requests, at least; None: of all."""
        known = self._known.setdefault((family, dtype, quantization, kv, mark, adapters), {})
        requests = self._marked_and_adapted(family, quantization, mark, adapters)[:count]
        if missing := [request for request in requests if request.request_id not in known]:
            model = self.model(family, quantization)
            known |= golden(model, dtype, quantization, kv.removeprefix("kv-"), missing, mark)
        return known


_OF_FEED_FORWARD = ("gate_up_proj", "up_proj", "down_proj", "w2", "w3")
_FIRST_TARGETS = ("q_proj", "q_b_proj", "o_proj", "qkv_proj", "c_attn", "c_proj", "lm_head", "up_proj")
_SECOND_TARGETS = ("v_proj", "kv_a_proj_with_mqa", "qkv_proj", "c_fc", "embed_tokens", "wte", *_OF_FEED_FORWARD)
"""Ends of the names of what each adapter changes, whatever the family calls it."""
_EXPERTS_OF_OWN_FORM = ("gpt_oss", "llama4_text", "mistral4", "minimax_m2", "gemma4_text")
"""Families whose experts `make_adapter` cannot name one by one."""


@pytest.fixture(scope="session")
def goldens(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Goldens:
    """The first eight requests have every sampling. All families preempt each other's if they are 16 at once."""
    numbers = (12, 16) if request.config.getoption("--full-matrix") else (8, 12)
    return Goldens(tmp_path_factory.mktemp("exactness"), *numbers)


EXACTNESS_SHAPE: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 64},
    "gemma2": {"sliding_window": 24},
    "gemma3_text": {"sliding_window": 24},
    "gpt_oss": {"sliding_window": 24},
    "llama4_text": {"attention_chunk_size": 24},
    "olmo3": {"sliding_window": 24},
    "cohere2": {"sliding_window": 24},
    "exaone4": {"sliding_window": 24},
    "gemma4_text": {"sliding_window": 24},
}
"""Windows that some requests outgrow and that others grow into, so that tight memory does preempt."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full-matrix")
        cases = (
            full_matrix(metafunc.config.getoption("keyword"))
            if full
            else list(
                dict.fromkeys(
                    [
                        *pairwise_sample(SAMPLED_FAMILIES, SCHEMES, quick=True),
                        *latent_layouts(),
                        *layouts_of_own_parts(),
                        *layouts_of_formats(),
                        *layouts_with_heads(),
                    ]
                )
            )
        )
        metafunc.parametrize("case", cases, ids=[case.name for case in cases])


def test_one_answer(case: Case, goldens: Goldens) -> None:
    requests = goldens.requests_of(case)
    golden_answers = goldens.answers(
        case.family, case.dtype, case.quantization, case.kv, case.mark, case.adapters, count=len(requests)
    )
    expected = {request.request_id: golden_answers[request.request_id] for request in requests}
    check_case(goldens.model(case.family, case.quantization), case, requests, expected)


def check_case(
    model: Path,
    case: Case,
    requests: Sequence[Request],
    expected: Mapping[str, Answer],
    chunk: int = 13,
    kernels: str = "auto",
) -> None:
    """Run a case and compare with the golden answers; `chunk` as in `run_case`."""
    answers, stats = run_case(model, case, requests, expected, chunk, kernels)
    for request_id, answer in answers.items():
        assert answer.token_ids == expected[request_id].token_ids, request_id
        assert answer.digests == expected[request_id].digests, request_id
        assert answer.finish_reason == expected[request_id].finish_reason, request_id
    assert answers.keys() == expected.keys()
    assert all(replica.kv_blocks_used == 0 for replica in stats)
    if case.memory == "tight":
        assert sum(replica.num_preemptions for replica in stats) > 0, "the case was to preempt"
    if case.cache == "warm":
        assert sum(replica.prefix_hits for replica in stats) > 0, "the case was to hit the prefix cache"
    if case.drafts != NO_DRAFTS:
        drafts = [replica.drafts for replica in stats if replica.drafts is not None]
        assert 0 < sum(one.num_accepted for one in drafts) < sum(one.num_tokens for one in drafts)


@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 3) for name in STORED if name not in SAMPLED_STORED), ("compressed-int8", 4)]
)
def test_every_other_format_has_one_answer_on_several_ranks(name: str, ranks: int, tmp_path: Path) -> None:
    """The full matrix has the other layouts of these formats. Of four ranks, each has fewer rows than a panel."""
    model, requests, answers = STORED[name].make(tmp_path), make_requests(VOCAB_SIZE, 2), []
    for tensor in (1, ranks):
        engine, executor = start_engine(model, tensor=tensor, quantization=name, dtype="bfloat16")
        answers.append(run(engine, requests, "together"))
        executor.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["fp8", "awq"])
def test_formats_are_not_taken_for_forms_of_the_same_name(
    name: str, goldens: Goldens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in a form are quantized here, and those in a format by the engine or before."""
    monkeypatch.setattr("tests.exactness.harness.quantize", None)
    engine, executor = start_engine(goldens.model("llama", name), quantization=name)
    engine.close()
    executor.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_golden_is_no_constant(goldens: Goldens, dtype: str) -> None:
    """Digests differ between positions and requests, so that equality of digests says something."""
    expected = goldens.answers("llama", dtype)
    digests = [digest for answer in expected.values() for digest in answer.digests]
    assert len(digests) == sum(len(answer.token_ids) for answer in expected.values())
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("mark", [KGW, SYNTHID])
def test_marks_change_the_answers_that_ask_for_them(goldens: Goldens, mark: str) -> None:
    """And no others, though they are in the same engine."""
    plain, changed = goldens.answers("llama", "float32"), goldens.answers("llama", "float32", mark=mark)
    same = {request_id for request_id, answer in plain.items() if answer == changed[request_id]}
    asked = {request.request_id for request in marked(goldens.requests, mark) if request.sampling.watermarking}
    greedy = {request.request_id for request in goldens.requests if request.sampling.temperature == 0.0}
    assert same >= goldens.answers("llama", "float32").keys() - asked
    assert not same & (asked - greedy)
    assert (greedy <= same) == (mark == SYNTHID)


def test_adapters_change_the_answers_that_have_them(goldens: Goldens) -> None:
    """And no others, though they are in the same engine."""
    plain, changed = goldens.answers("llama", "float32"), goldens.answers("llama", "float32", adapters=ADAPTERS)
    refs = goldens.adapters("llama")
    assert len(set(refs)) == 3
    same = {request_id for request_id, answer in plain.items() if answer == changed[request_id]}
    assert same == {one.request_id for one in adapted(goldens.requests, refs) if one.adapter is None}
