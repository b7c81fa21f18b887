"""Context parallelism before anything is loaded: what is refused, and how much longer requests may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import Deployment, FixedPool
from shardline.deployment.here import resolve_here
from shardline.models.kv_blocks import longest_request
from tests.deployment.test_resolve import GIB, machine, resolve_on
from tests.models.checkpoints import make_checkpoint


def resolved(model: Path | str = "demo", **options: object) -> Deployment:
    return resolve_here(EngineConfig.from_options(model=str(model), **options))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"context_parallel_size": 5}, "more than the 4 splits of 512 tokens that max_model_len 2048 has"),
        ({"context_parallel_size": 2, "max_model_len": 512}, "more than the 1 split of 512 tokens"),
        ({"context_parallel_size": 3, "tensor_parallel_size": 3}, "3 x context_parallel_size 3 = 9 does not work"),
        ({"context_parallel_size": 2, "block_size": 48}, "--block-size 48 does not divide them"),
        (
            {"decode_context_parallel_size": 2, "tensor_parallel_size": 3},
            "must divide tensor_parallel_size, which is 3",
        ),
        ({"decode_context_parallel_size": 2}, "must divide tensor_parallel_size, which is 1"),
        (
            {"decode_context_parallel_size": 2, "tensor_parallel_size": 2, "context_parallel_size": 2},
            "say the same; leave one of them out",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        resolved(**options)


def test_devices_that_refuse_it() -> None:
    with pytest.raises(ValueError, match="works on CPUs only so far; use tensor_parallel_size 2 instead"):
        resolve_on(machine(*((80 * GIB, 79 * GIB),) * 2), context_parallel_size=2)


def test_ranks_do_not_share_keys_that_an_indexer_chooses_from(tmp_path: Path) -> None:
    model = make_checkpoint("deepseek_v32", tmp_path / "model", max_position_embeddings=2048)
    with pytest.raises(
        ValueError, match="latent attention to all tokens only so far, and deepseek_v32 has other layers"
    ):
        resolved(model, context_parallel_size=2)


def test_any_kernels_of_a_cpu_take_it() -> None:
    assert resolved(context_parallel_size=2, kernels="torch").grid.context == 2


def test_a_draft_model_divides_its_heads_over_the_ranks(tmp_path: Path) -> None:
    """Each has its keys of all tokens, in blocks as many as all ranks have of the model."""
    shape: dict[str, Any] = {"max_position_embeddings": 2048, "num_attention_heads": 8, "num_key_value_heads": 4}
    draft = make_checkpoint("qwen2", tmp_path / "draft", **shape)
    model = make_checkpoint("llama", tmp_path / "model", **shape)
    options: dict[str, Any] = {"max_model_len": "auto"}
    options["speculative_config"] = {"model": str(draft), "num_speculative_tokens": 3}
    alone, shared = resolved(model, **options).draft, resolved(model, context_parallel_size=4, **options).draft
    assert alone is not None
    assert shared is not None
    assert shared.block_bytes == (alone.block_bytes[0] // 4,) * 4
    assert sum(rank.num_bytes for rank in shared.weights) < 1.2 * alone.weights[0].num_bytes


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_hold_as_many_times_longer_requests(size: int) -> None:
    """With the same memory on each rank, whose weights are fewer, too."""
    memory: dict[str, Any] = {"kv_cache_memory": 8192 * (512 + 2 * 32), "max_model_len": "auto"}
    alone, shared = resolved(**memory), resolved(context_parallel_size=size, **memory)
    assert alone.max_model_len == 512 + 32
    assert 512 * size <= shared.max_model_len <= 512 * size + 32, (
        "perhaps the first rank has a block of a further split"
    )
    assert shared.cache.block_bytes == (-(-alone.cache.block_bytes[0] // size),) * size
    assert sum(rank.num_bytes for rank in shared.weights) < 1.1 * alone.weights[0].num_bytes
    pool, cache = shared.cache.pool, shared.cache
    assert isinstance(pool, FixedPool)
    assert pool.num_blocks % size == 0
    usable = pool.num_blocks - size
    assert longest_request(cache.groups, usable, cache.block_size, 2048, 2048, size) == shared.max_model_len


def test_the_flags_of_vllm_mean_what_they_mean_there() -> None:
    divided = resolved(tensor_parallel_size=4, decode_context_parallel_size=2).grid
    assert (divided.tensor, divided.context, divided.world_size) == (2, 2, 4)
    added = resolved(tensor_parallel_size=2, prefill_context_parallel_size=2).grid
    assert added == divided
