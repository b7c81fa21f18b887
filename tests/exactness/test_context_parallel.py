"""One answer if ranks share the keys of long requests: tokens and digests are those of one rank that has them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardline.messages.request import Request
from tests.exactness.cases import Case, context_layouts
from tests.exactness.harness import Answer, golden, make_long_requests, marked, run, start_engine
from tests.exactness.test_matrix import check_case
from tests.models.checkpoints import make_checkpoint

_POSITIONS = 1536
_YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": _POSITIONS // 4}
_OWN_SHAPE: dict[str, dict[str, Any]] = {
    "gpt_oss": {"head_dim": 8, "sliding_window": 600, "rope_parameters": {**_YARN, "truncate": False}},
    "gemma2": {"head_dim": 8, "sliding_window": 600},
    "llama4_text": {"head_dim": 8, "attention_chunk_size": 600},
    "gemma4_text": {"sliding_window": 600},
    "deepseek_v3": {"num_key_value_heads": 8},
}
"""Windows longer than a split, and shorter than some requests."""


def make_long_checkpoint(family: str, folder: Path) -> Path:
    """A checkpoint whose requests may have three splits of keys."""
    shape: dict[str, Any] = {"max_position_embeddings": _POSITIONS, "num_attention_heads": 8}
    return make_checkpoint(family, folder, **shape, **_OWN_SHAPE.get(family, {"head_dim": 8}))


class LongGoldens:
    """Checkpoints whose requests have several splits of keys, and their golden answers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[str, ...], dict[str, Answer]] = {}

    def requests_of(self, case: Case) -> list[Request]:
        """Some have several splits. Where memory is tight, many fit at first, and grow."""
        if case.memory == "roomy":
            return marked(make_long_requests(256, (8, 522, 1290)), case.mark)
        growing = [
            msgspec.structs.replace(one, sampling=msgspec.structs.replace(one.sampling, max_tokens=30, min_tokens=30))
            for one in make_long_requests(256, (76,) * 8)
        ]
        return [*growing, msgspec.structs.replace(make_long_requests(256, (1090,))[0], request_id="long")]

    def model(self, family: str) -> Path:
        folder = self._folder / family
        if folder.exists():
            return folder
        return make_long_checkpoint(family, folder)

    def answers(self, case: Case) -> dict[str, Answer]:
        key = case.family, case.dtype, case.quantization, case.kv, case.mark, case.memory
        if key not in self._known:
            requests = self.requests_of(case)
            kv = case.kv.removeprefix("kv-")
            self._known[key] = golden(self.model(case.family), case.dtype, case.quantization, kv, requests, case.mark)
        return self._known[key]


@pytest.fixture(scope="module")
def long_goldens(tmp_path_factory: pytest.TempPathFactory) -> LongGoldens:
    return LongGoldens(tmp_path_factory.mktemp("context"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = context_layouts(full=metafunc.config.getoption("--full-matrix"))
        metafunc.parametrize("case", cases, ids=[case.name for case in cases])


def test_one_answer_of_ranks_that_share_keys(case: Case, long_goldens: LongGoldens) -> None:
    requests = long_goldens.requests_of(case)
    check_case(long_goldens.model(case.family), case, requests, long_goldens.answers(case), chunk=600)


def test_blocks_of_all_ranks_come_back_from_a_tier_and_from_its_files(
    long_goldens: LongGoldens, tmp_path: Path
) -> None:
    """In a pool that has room for one request; the second engine finds all in files."""
    case = context_layouts(full=False)[0]
    model, longest, expected = long_goldens.model(case.family), long_goldens.requests_of(case)[-1], {}
    requests = [msgspec.structs.replace(longest, request_id=salt, cache_salt=salt) for salt in "abc"]
    for request in requests:
        expected[request.request_id] = long_goldens.answers(case)[longest.request_id]
    for run_number in range(2):
        engine, executor = start_engine(
            model,
            context=2,
            namespace=b"namespace of a folder",
            dtype=case.dtype,
            mark=case.mark,
            num_gpu_blocks_override=128,  # of each rank, two splits
            kv_offloading_size=2 / 1024,
            kv_offloading_dir=str(tmp_path),
        )
        for _ in range(2 - run_number):
            assert run(engine, requests, "alone") == expected
        tier = engine.stats().tier
        engine.close()
        executor.close()
        assert tier is not None
        assert tier.hits > 3 * 1024, "blocks of both ranks"
        assert (tier.lost_blocks, tier.copies.corrupt_blocks, tier.copies.file_errors) == (0, 0, 0)
        assert (tier.copies.written_bytes > 0) == (run_number == 0)
        assert (tier.copies.read_bytes > 0) == (run_number == 1)
