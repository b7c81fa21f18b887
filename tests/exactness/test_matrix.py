"""One answer: tokens and fp32-logits digests of every request are equal over the whole matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardline.messages.request import Request
from tests.exactness.cases import (
    KGW,
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
from tests.exactness.harness import Answer, golden, make_requests, marked, run, run_case, start_engine
from tests.exactness.stored import SAMPLED_STORED, STORED
from tests.models.checkpoints import make_checkpoint
from tests.models.heads import PREDICTING, make_predicting

VOCAB_SIZE = 256


class Goldens:
    """Checkpoint, requests and golden answers of each family, dtype, quantization, KV type and mark, made when asked
    for."""

    def __init__(self, folder: Path, few: int) -> None:
        """`few`: requests of a case in which memory is not tight."""
        self._folder, self._few = folder, few
        self._known: dict[tuple[str, str, str, str, str], dict[str, Answer]] = {}
        self.requests = make_requests(VOCAB_SIZE, 12)

    def model(self, family: str, quantization: str = "none") -> Path:
        if quantization in STORED:
            return STORED[quantization].make(self._folder / quantization)
        folder, make = self._folder / family, make_predicting if family in PREDICTING else make_checkpoint
        return folder if folder.exists() else make(family, folder, **EXACTNESS_SHAPE.get(family, {}))

    def requests_of(self, case: Case) -> list[Request]:
        """As many as preempt each other where memory is tight."""
        return marked(self.requests if case.memory == "tight" else self.requests[: self._few], case.mark)

    def answers(
        self,
        family: str,
        dtype: str,
        quantization: str = "none",
        kv: str = "kv-auto",
        mark: str = NO_MARK,
        count: int | None = None,
    ) -> dict[str, Answer]:
        """Those of the first `count` requests, at least; None: of all."""
        known = self._known.setdefault((family, dtype, quantization, kv, mark), {})
        requests = marked(self.requests, mark)[:count]
        if missing := [request for request in requests if request.request_id not in known]:
            model = self.model(family, quantization)
            known |= golden(model, dtype, quantization, kv.removeprefix("kv-"), missing, mark)
        return known


@pytest.fixture(scope="session")
def goldens(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Goldens:
    """The first eight requests have every sampling."""
    return Goldens(tmp_path_factory.mktemp("exactness"), 12 if request.config.getoption("--full-matrix") else 8)


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
        case.family, case.dtype, case.quantization, case.kv, case.mark, count=len(requests)
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


@pytest.mark.parametrize("name", [name for name in STORED if name not in SAMPLED_STORED])
def test_every_other_format_has_one_answer_on_three_ranks(name: str, tmp_path: Path) -> None:
    """The full matrix has the other layouts of these formats."""
    model, requests, answers = STORED[name].make(tmp_path), make_requests(VOCAB_SIZE, 2), []
    for tensor in (1, 3):
        engine, executor = start_engine(model, tensor=tensor, quantization=name, dtype="bfloat16")
        answers.append(run(engine, requests, "together"))
        executor.close()
    assert answers[0] == answers[1]


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
