"""Every choice is made, every refusal given, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.config.engine import EngineConfig
from shardline.engine import resolve as resolve_module
from shardline.engine.resolve import resolve
from shardline.runtime.setup import ReplicaSetup, prepare


def setup(**options: object) -> ReplicaSetup:
    return prepare(resolve(EngineConfig.from_options(**options)))


def test_resolving_is_repeatable_and_final() -> None:
    resolved = resolve(EngineConfig.from_options(tensor_parallel_size=3))
    assert resolve(resolved) == resolved
    assert prepare(resolved) == prepare(resolved)
    assert resolved.parallel.distributed_executor_backend == "mp"
    assert Path(resolved.model.model).is_dir()
    assert resolved.model.dtype == "bfloat16"


def test_the_pool_is_what_the_memory_holds() -> None:
    roomy = setup(kv_cache_memory="8MiB", max_model_len=64)
    # 8 layers x 8 KV heads x 32 dims x (keys and values) x 2 bytes, 16 tokens a block.
    assert roomy.block_bytes(0) == 8 * 8 * 32 * 2 * 2 * 16
    assert roomy.num_blocks == (8 << 20) // roomy.block_bytes(0)
    split = setup(kv_cache_memory="8MiB", max_model_len=64, tensor_parallel_size=2)
    assert split.num_blocks == min(2 * roomy.num_blocks, 128 * 4 + 1)


def test_a_length_that_does_not_fit_is_refused_with_one_that_does() -> None:
    with pytest.raises(ValueError, match="--max-model-len 1008"):
        resolve(EngineConfig.from_options(kv_cache_memory="8MiB"))
    assert setup(kv_cache_memory="8MiB", max_model_len="auto").max_model_len == 1008
    with pytest.raises(ValueError, match="too few for any request"):
        resolve(EngineConfig.from_options(kv_cache_memory="100KiB"))


def test_weights_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve_module, "available_host_memory", lambda: 20_000_000)
    with pytest.raises(ValueError, match="2 x 11"):
        resolve(EngineConfig.from_options(data_parallel_size=2))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor_parallel_size": 9}, "use 8"),
        ({"pipeline_parallel_size": 9}, "use 8 or fewer"),
        ({"pipeline_parallel_size": 2, "pipeline_stages": "8"}, "2 positive counts"),
        ({"pipeline_parallel_size": 2, "pipeline_stages": "a,b"}, "10,12,10"),
        ({"max_model_len": 5000}, "2048"),
        ({"dtype": "half"}, "bfloat16 or float32"),
        ({"enable_expert_parallel": True}, "mixture-of-experts"),
        ({"distributed_executor_backend": "uni", "tensor_parallel_size": 2}, "use 'mp'"),
    ],
)
def test_refusals(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError) as error:
        resolve(EngineConfig.from_options(**options))
    assert says in str(error.value)


def test_stages_by_hand() -> None:
    spans = setup(pipeline_parallel_size=3, pipeline_stages="1,5,2").stages
    assert [(span.start, span.stop) for span in spans] == [(0, 1), (1, 6), (6, 8)]
