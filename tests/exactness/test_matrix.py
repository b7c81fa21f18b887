"""One answer: tokens and fp32-logits digests of every request are equal over the whole matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.types import Request
from tests.exactness.cases import Case, full_product, pairwise_sample
from tests.exactness.harness import Answer, golden, make_requests, run_case
from tests.models.checkpoints import make_checkpoint

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt2")
VOCAB_SIZE = 256


@pytest.fixture(scope="session")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Request], dict[str, Answer]]]:
    """Checkpoint, requests and golden answers of each family, made when first asked for."""
    folder = tmp_path_factory.mktemp("exactness")
    known: dict[str, tuple[Path, list[Request], dict[str, Answer]]] = {}

    class Goldens(dict[str, tuple[Path, list[Request], dict[str, Answer]]]):
        def __missing__(self, family: str) -> tuple[Path, list[Request], dict[str, Answer]]:
            model = make_checkpoint(family, folder / family, **EXACTNESS_SHAPE.get(family, {}))
            requests = make_requests(VOCAB_SIZE)
            self[family] = (model, requests, golden(model, requests))
            return self[family]

    return Goldens(known)


EXACTNESS_SHAPE: dict[str, dict[str, object]] = {}
"""Overrides per family, where its test checkpoint is too small for TP 4 or PP 3."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full-matrix")
        cases = full_product(FAMILIES) if full else pairwise_sample(FAMILIES)
        metafunc.parametrize("case", cases, ids=[case.name for case in cases])


def test_one_answer(case: Case, goldens: dict[str, tuple[Path, list[Request], dict[str, Answer]]]) -> None:
    model, requests, expected = goldens[case.family]
    answers, stats = run_case(model, case, requests)
    for request_id, answer in answers.items():
        assert answer.token_ids == expected[request_id].token_ids, request_id
        assert answer.digests == expected[request_id].digests, request_id
        assert answer.finish_reason == expected[request_id].finish_reason, request_id
    assert answers.keys() == expected.keys()
    assert all(replica.kv_blocks_used == 0 for replica in stats)
    if case.memory == "tight":
        assert sum(replica.num_preemptions for replica in stats) > 0, "the case was to preempt"
    if case.cache == "warm":
        assert all(replica.prefix_hits > 0 for replica in stats), "the case was to hit the prefix cache"


def test_the_golden_is_no_constant(goldens: dict[str, tuple[Path, list[Request], dict[str, Answer]]]) -> None:
    """Digests differ between positions and requests, so that equality of digests says something."""
    _, _, expected = goldens["llama"]
    digests = [digest for answer in expected.values() for digest in answer.digests]
    assert len(digests) == sum(len(answer.token_ids) for answer in expected.values())
    assert len(set(digests)) == len(digests)
