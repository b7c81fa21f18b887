"""One answer if ranks share the keys of long requests: tokens and digests are those of one rank that has them all."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shardline.messages.request import Request
from tests.exactness.cases import Case, context_layouts
from tests.exactness.harness import Answer, golden, make_long_requests, marked
from tests.exactness.test_matrix import check_case
from tests.models.checkpoints import make_checkpoint

_POSITIONS = 1536
_YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": _POSITIONS // 4}
_OWN_SHAPE: dict[str, dict[str, object]] = {
    "gpt_oss": {"head_dim": 8, "sliding_window": 600, "rope_parameters": {**_YARN, "truncate": False}},
    "gemma2": {"head_dim": 8, "sliding_window": 600},
    "llama4_text": {"head_dim": 8, "attention_chunk_size": 600},
    "gemma4_text": {"sliding_window": 600},
    "deepseek_v3": {"num_key_value_heads": 8},
}
"""Windows longer than a split, and shorter than some requests."""


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
        shape = {"max_position_embeddings": _POSITIONS, "num_attention_heads": 8}
        return make_checkpoint(family, folder, **shape, **_OWN_SHAPE.get(family, {"head_dim": 8}))

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
