"""Models that keep a state for each request, before anything is loaded: what is refused, and the memory of states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import Deployment, FixedPool
from shardline.deployment.here import resolve_here
from shardline.models.linear_attention import LinearAttention
from tests.deployment.machines import machine, resolve_on
from tests.models.checkpoints import make_checkpoint

MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint("qwen3_5_text", tmp_path_factory.mktemp("states") / "model"))


def resolved(model: str, **options: Any) -> Deployment:
    return resolve_here(EngineConfig.from_options(model=model, **options))


def test_prefixes_are_not_cached(model: str) -> None:
    assert resolved("demo").cache.prefix_caching
    assert not resolved(model).cache.prefix_caching


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'},
            "layers of qwen3_5_text keep a state for each request, and not that before a wrong guess; leave spec",
        ),
        (
            {"kv_offloading_size": 1.0},
            "prefixes, and qwen3_5_text, whose layers keep a state for each request, has none: leave it out",
        ),
        (
            {"kv_events_config": '{"enable_kv_cache_events": true, "publisher": "zmq"}'},
            "prefix cache, and qwen3_5_text, whose layers keep a state for each request, has none: leave it out",
        ),
        ({"context_parallel_size": 2, "max_model_len": 256}, "and qwen3_5_text has other layers; use tensor_parallel"),
        ({"tensor_parallel_size": 5}, "it has 4 attention heads and a state for each of them, and every .* use 4"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(model: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        resolved(model, **options)


@pytest.mark.parametrize("ranks", [{}, {"draft_ranks": 1}], ids=str)
def test_a_draft_model_keeps_none(model: str, ranks: dict[str, int], tmp_path: Path) -> None:
    target = str(make_checkpoint("llama", tmp_path / "target"))
    with pytest.raises(ValueError, match="keeps a state for each request, and not that before a wrong guess; use one"):
        resolved(target, speculative_config={"model": model, "num_speculative_tokens": 2, **ranks})


def test_states_have_memory(tmp_path: Path) -> None:
    model = str(make_checkpoint("qwen3_5_text", tmp_path / "model", max_position_embeddings=1 << 16))
    spec = resolved(model).spec
    attentions = [layer.attention for layer in spec.layers if isinstance(layer.attention, LinearAttention)]
    of_request = sum(attention.state_bytes(0, 1, "float32") for attention in attentions)
    # Two of three tokens before, 2 x 4 keys of 20 and 8 values of 12; 8 states of 20 x 12.
    assert of_request == 3 * 4 * (8 * 20 * 12 + 2 * (2 * 4 * 20 + 8 * 12))

    def room(seqs: int, **options: Any) -> int:
        found = resolve_on(
            machine(free_memory=64 * MIB),
            model=model,
            device="cpu",
            max_num_seqs=seqs,
            **{"max_num_batched_tokens": 4096, "max_model_len": "auto", **options},
        )
        assert isinstance(found.cache.pool, FixedPool)
        return found.cache.pool.num_blocks * max(found.cache.block_bytes)

    fewer, more = room(10), room(510)
    # Half of 0.9 of what is left is for keys and values.
    block = max(resolved(model).cache.block_bytes)
    assert fewer - more == pytest.approx(0.45 * 500 * of_request, abs=2 * block)
    with pytest.raises(ValueError, match=r"the states of 2000 requests need .* lower --max-num-seqs to \d+ or less"):
        room(2000)
    with pytest.raises(ValueError, match="lower --max-num-seqs to") as refused:
        room(4000)
    fits = advised(refused)
    assert room(fits) > 0
    # A KV cache of a set size does not get half.
    assert room(fits + 100, kv_cache_memory="8MiB", max_model_len=2048) > 0
    with pytest.raises(ValueError, match="lower --max-num-seqs to") as refused:
        room(4000, kv_cache_memory="8MiB", max_model_len=2048)
    assert room(advised(refused), kv_cache_memory="8MiB", max_model_len=2048) > 0


def advised(refused: pytest.ExceptionInfo[ValueError]) -> int:
    return int(str(refused.value).removesuffix(" or less").rpartition("--max-num-seqs to ")[2])


def test_states_of_gpus_have_memory(tmp_path: Path) -> None:
    model = str(make_checkpoint("qwen3_5_text", tmp_path / "model"))
    gpu = machine((64 * MIB, 63 * MIB))
    options: dict[str, Any] = {"model": model, "device": "cuda", "kernels": "torch", "max_num_batched_tokens": 512}
    assert resolve_on(gpu, **options, max_num_seqs=100).state_bytes
    with pytest.raises(
        ValueError, match=r"the states of 2000 requests need .*, and a GPU has .* lower --max-num-seqs"
    ) as refused:
        resolve_on(gpu, **options, max_num_seqs=2000)
    assert resolve_on(gpu, **options, max_num_seqs=advised(refused)).state_bytes
    with pytest.raises(ValueError, match="lower --max-num-seqs to") as refused:
        resolve_on(gpu, **options, max_num_seqs=2000, kv_cache_memory="8MiB")
    assert resolve_on(gpu, **options, max_num_seqs=advised(refused), kv_cache_memory="8MiB").state_bytes


def test_models_without_keys_are_refused(tmp_path: Path) -> None:
    model = make_checkpoint(
        "qwen3_5_text", tmp_path / "model", layer_types=["linear_attention"] * 2, num_hidden_layers=2
    )
    with pytest.raises(ValueError, match="no layer of this qwen3_5_text has keys and values"):
        resolved(str(model))
