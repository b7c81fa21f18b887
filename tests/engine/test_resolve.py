"""Every choice is made, every refusal given, before anything is loaded."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from shardline.config.engine import EngineConfig
from shardline.engine import host_memory
from shardline.engine import resolve as resolve_module
from shardline.engine.resolve import resolve
from shardline.runtime.setup import ReplicaSetup, prepare
from tests.models.checkpoints import make_checkpoint, make_variant


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
    assert roomy.num_blocks == (8 << 20) // (8 * 8 * 32 * 2 * 2 * 16)
    bytewise = setup(kv_cache_memory="8MiB", max_model_len=64, kv_cache_dtype="int8")
    assert bytewise.num_blocks == (8 << 20) // (8 * 8 * (32 + 4) * 2 * 16)  # a byte each, and a scale
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
        ({"device": "cpu", "kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8 needs a GPU, and this is the CPU; use int8"),
        ({"device": "cpu", "kv_cache_dtype": "fp8_e4m3"}, "use int8"),
        ({"enable_expert_parallel": True}, "mixture-of-experts"),
        ({"distributed_executor_backend": "uni", "tensor_parallel_size": 2}, "use 'mp'"),
    ],
)
def test_refusals(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        resolve(EngineConfig.from_options(**options))


def test_experts_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    model = str(make_checkpoint("mixtral", tmp_path / "model", num_local_experts=3))
    whole = {"model": model, "enable_expert_parallel": True}
    assert setup(tensor_parallel_size=3, **whole).expert_parallel
    with pytest.raises(ValueError, match=r"4 ranks .* cannot share 3; use 3 ranks a stage or fewer"):
        resolve(EngineConfig.from_options(tensor_parallel_size=4, **whole))
    assert setup(model=model, tensor_parallel_size=4).grid.tensor == 4


def test_a_missing_expert_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.2.mlp.experts.7.down_proj.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.experts\.7\.down_proj\.weight is missing"):
        resolve(EngineConfig.from_options(model=str(model)))


def test_memory_that_is_asked_for_must_be_there() -> None:
    with pytest.raises(ValueError, match="lower --kv-cache-memory"):
        resolve(EngineConfig.from_options(num_gpu_blocks_override=10**9))


def test_a_rope_that_follows_the_length_wants_a_length(tmp_path: Path) -> None:
    """Else the layout, by the memory it leaves, would choose the tokens."""
    model = str(make_variant("phi3-longrope-long", tmp_path / "model"))
    options = {"model": model, "kv_cache_memory": "8KiB", "block_size": 4}
    with pytest.raises(ValueError, match="set it yourself"):
        resolve(EngineConfig.from_options(max_model_len="auto", **options))


def test_a_folder_called_demo_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("llama", tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    assert resolve(EngineConfig.from_options(model="./demo")).model.model == str(tmp_path / "demo")


def test_a_window_bounds_what_a_long_request_holds(tmp_path: Path) -> None:
    model = str(make_checkpoint("mistral", tmp_path / "model", max_position_embeddings=4096))
    wide = setup(model=model, num_gpu_blocks_override=20, max_num_batched_tokens=32)
    assert wide.max_model_len == 4096


def test_page_cache_is_memory_that_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 700\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(host_memory, "_own_groups", lambda controller: [tmp_path])
    assert host_memory.available_host_memory() == 800
    assert host_memory.allowed_cpus() == min(2, len(os.sched_getaffinity(0)))


def test_stages_by_hand() -> None:
    spans = setup(pipeline_parallel_size=3, pipeline_stages="1,5,2").stages
    assert [(span.start, span.stop) for span in spans] == [(0, 1), (1, 6), (6, 8)]


def test_what_was_chosen_is_told_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    resolved = resolve(EngineConfig.from_options(pipeline_parallel_size=2))
    [line] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("chosen: ")]
    for words in (
        "dtype bfloat16 (the checkpoint's is bfloat16)",
        "max_model_len 2048 (all that the model has)",
        "executor mp (2 ranks a replica)",
        "pipeline_stages 4,4 (balanced",
        "of KV cache a rank",
    ):
        assert words in line
    caplog.clear()
    resolve(dataclasses.replace(resolved, parallel=dataclasses.replace(resolved.parallel, pipeline_stages="4,4")))
    assert not [record for record in caplog.records if "chosen" in record.getMessage()]
