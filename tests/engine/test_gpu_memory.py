"""GPUs as the driver's tool reports them, and what the configuration makes of them."""

from __future__ import annotations

import importlib.metadata
import stat
from pathlib import Path

import pytest

from shardline.config.engine import EngineConfig
from shardline.engine import resolve as resolve_module
from shardline.engine.gpu_memory import gpu_memory, gpus_of_replica
from shardline.engine.kv_budget import gpu_kv_bytes
from shardline.engine.resolve import resolve
from shardline.models.sizes import kv_bytes_per_token
from shardline.runtime.setup import prepare
from tests.loader.packer import pack_checkpoint
from tests.models.checkpoints import make_checkpoint

GIB = 1 << 30


@pytest.fixture
def fake_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '143771, 143000'\necho '81559, 512'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.11.0+cu130")
    return tool


def test_memory_of_every_gpu(fake_tool: Path) -> None:
    assert gpu_memory() == [(143771 << 20, 143000 << 20), (81559 << 20, 512 << 20)]


def test_only_visible_gpus_count(fake_tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tool.write_text("#!/bin/sh\nfor word; do case $word in --id=4,GPU-7) echo '81559, 512';; esac; done\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7")
    assert gpu_memory() == [(81559 << 20, 512 << 20)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_memory() == []


def test_replicas_take_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_of_replica(0, 2) == "0,1"
    assert gpus_of_replica(3, 2) == "6,7"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-1,0")
    assert gpus_of_replica(1, 1) == "GPU-1"
    assert gpus_of_replica(0, 3) == "5,GPU-1,0"


def test_no_gpu_where_the_tool_fails_or_torch_has_no_cuda(fake_tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tool.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_memory() == []
    fake_tool.write_text("#!/bin/sh\necho '143771, 143000'\n")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert gpu_memory() == []


def with_gpus(monkeypatch: pytest.MonkeyPatch, *gpus: tuple[int, int]) -> None:
    monkeypatch.setattr(resolve_module, "gpu_memory", lambda: list(gpus))


def test_auto_takes_the_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch)
    assert resolve(EngineConfig()).parallel.device == "cpu"
    with_gpus(monkeypatch, (8 * GIB, 8 * GIB))
    resolved = resolve(EngineConfig())
    assert resolved.parallel.device == "cuda"
    assert prepare(resolved).collectives == "nccl"
    assert resolve(EngineConfig.from_options(device="cpu")).parallel.device == "cpu"


def test_the_estimate_is_what_weights_and_activations_leave_of_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = (8 * GIB, 7 * GIB)
    with_gpus(monkeypatch, gpu)
    sizes = {}
    for share in (0.5, 0.9):
        setup = prepare(resolve(EngineConfig.from_options(device="cuda", gpu_memory_utilization=share)))
        assert setup.num_blocks == 0, "the ranks measure"
        sizes[share] = gpu_kv_bytes(setup.config, setup.spec, setup.grid, setup.stages, setup.dtype, [gpu])
    assert sizes[0.9] - sizes[0.5] == int(8 * GIB * 0.5) - int(8 * GIB * (1 - 0.9))
    assert 6 * GIB < sizes[0.9] < 6.2 * GIB


def test_pools_of_a_size_that_was_asked_for_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, (8 * GIB, 7 * GIB))
    assert prepare(resolve(EngineConfig.from_options(device="cuda", num_gpu_blocks_override=170))).num_blocks == 171
    assert prepare(resolve(EngineConfig.from_options(device="cuda", kv_cache_memory="1GiB"))).num_blocks > 1000


def test_an_automatic_length_leaves_room_for_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prepare(resolve(EngineConfig.from_options(device="cpu", kv_cache_memory="1GiB")))
    request = whole.max_model_len * kv_bytes_per_token(whole.spec, whole.grid.place(0), whole.stages, whole.dtype)
    setup = (whole.config, whole.spec, whole.grid, whole.stages, whole.dtype)
    missing = -gpu_kv_bytes(*setup, [(8 * GIB, 7 * GIB)])
    lengths = {}
    for asked in (None, "auto"):
        # Half a request fits by the estimate.
        with_gpus(monkeypatch, (8 * GIB, 7 * GIB + missing + request // 2))
        try:
            lengths[asked] = resolve(EngineConfig.from_options(device="cuda", max_model_len=asked)).model.max_model_len
        except ValueError as refusal:
            lengths[asked] = int(str(refusal).split("--max-model-len ")[1].split()[0])
    assert lengths[None] == pytest.approx(whole.max_model_len / 2, rel=0.05)
    assert lengths["auto"] == pytest.approx(0.8 * lengths[None], rel=0.05)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor_parallel_size": 2}, "2 ranks and this host 1 GPUs.*for tests only, --collectives gloo"),
        ({"tensor_parallel_size": 2, "collectives": "shm"}, "use 'nccl'"),
        ({"distributed_executor_backend": "threads"}, "use 'mp'"),
        ({"gpu_memory_utilization": 0.01}, "a GPU has to hold"),
    ],
)
def test_what_a_gpu_cannot_is_refused(options: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, (8 * GIB, 7 * GIB))
    with pytest.raises(ValueError, match=says):
        resolve(EngineConfig.from_options(device="cuda", **options))


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_a_gpu_keeps_keys_and_values_in_fp8(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_gpus(monkeypatch, (8 * GIB, 7 * GIB))
    options = {"device": "cuda", "kv_cache_memory": "8MiB", "max_model_len": 64, "kv_cache_dtype": name}
    setup = prepare(resolve(EngineConfig.from_options(**options)))
    assert setup.kv_dtype == "float8_e4m3fn"
    assert setup.num_blocks == (8 << 20) // (8 * 8 * (32 + 4) * 2 * 16)  # a byte each, and a scale
    latents = str(make_checkpoint("deepseek_v2", tmp_path))
    setup = prepare(resolve(EngineConfig.from_options(**{**options, "kv_cache_memory": "1MiB"}, model=latents)))
    assert setup.num_blocks == (1 << 20) // (4 * (24 + 2 * 8 + 4) * 16)  # what is rotated stays in bf16
    with pytest.raises(ValueError, match="of latent attention needs a GPU"):
        resolve(EngineConfig.from_options(model=latents, kv_cache_dtype="int8", device="cpu"))


def test_a_gpu_keeps_the_bits_that_a_checkpoint_has_packed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_gpus(monkeypatch, (8 * GIB, 7 * GIB), (8 * GIB, 7 * GIB))
    model = make_checkpoint("llama", tmp_path / "model")
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    pack_checkpoint(model, tmp_path / "packed", tmp_path / "plain", config)
    options = {"device": "cuda", "num_gpu_blocks_override": 32, "model": str(tmp_path / "packed")}
    resolved = resolve(EngineConfig.from_options(**options))
    assert resolved.model.quantization == "w4a16_32"
    assert resolve(resolved) == resolved
    assert prepare(resolved).keeps_packed
    assert resolve(EngineConfig.from_options(**options, quantization="w4a16")) == resolved
    for scheme, name in (("none", None), ("int8", "int8")):
        chosen = resolve(EngineConfig.from_options(**options, quantization=scheme))
        assert prepare(chosen).quantization == name
        assert not prepare(chosen).keeps_packed
        assert resolve(chosen) == chosen
    dummy = resolve(EngineConfig.from_options(**options, load_format="dummy"))
    assert dummy.model.quantization is None
    with pytest.raises(ValueError, match="use --numerics exact, or --quantization none"):
        resolve(EngineConfig.from_options(**options, numerics="fast", tensor_parallel_size=2))
    with pytest.raises(ValueError, match="is for GPTQ and AWQ checkpoints, and this is none; use int4"):
        resolve(EngineConfig.from_options(device="cuda", quantization="w4a16"))
    with pytest.raises(ValueError, match="quantization w4a16 needs a GPU"):
        resolve(EngineConfig.from_options(**{**options, "device": "cpu"}, quantization="w4a16"))


def test_nccl_needs_gpus() -> None:
    with pytest.raises(ValueError, match="'nccl' needs GPUs"):
        resolve(EngineConfig.from_options(device="cpu", collectives="nccl"))


def test_experts_are_split_over_gpus_or_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_gpus(monkeypatch, (8 * GIB, 7 * GIB), (8 * GIB, 7 * GIB))
    options = {"model": str(make_checkpoint("mixtral", tmp_path)), "device": "cuda", "tensor_parallel_size": 2}
    for is_whole in (False, True):
        resolved = resolve(EngineConfig.from_options(**options, enable_expert_parallel=is_whole))
        assert prepare(resolved).collectives == "nccl"
        assert prepare(resolved).tries_symmetric_memory
    by_name = prepare(resolve(EngineConfig.from_options(**options, collectives="nccl")))
    assert by_name.collectives == "nccl"
    assert not by_name.tries_symmetric_memory


def test_ranks_share_a_gpu_over_gloo(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with_gpus(monkeypatch, (8 * GIB, 7 * GIB))
    rooms = {}
    for size in (1, 2, 4):
        options = {"device": "cuda", "collectives": "gloo", "tensor_parallel_size": size}
        with caplog.at_level("WARNING", "shardline"):
            resolved = resolve(EngineConfig.from_options(**options))
        assert "test mode" in caplog.text
        assert prepare(resolved).collectives == "gloo"
        rooms[size] = resolved.cache.kv_cache_memory
    assert all(isinstance(room, int) for room in rooms.values()), "ranks that share a GPU do not measure"
    assert 3 * GIB < rooms[2] < rooms[1] / 1.9
    assert 1.4 * GIB < rooms[4] < rooms[2] / 1.9


def test_every_gpu_holds_all_latents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_gpus(monkeypatch, (8 * GIB, 7 * GIB), (8 * GIB, 7 * GIB))
    options = {"model": str(make_checkpoint("deepseek_v2", tmp_path)), "max_model_len": 64, "kv_cache_memory": "1MiB"}
    blocks = {}
    for device, size in (("cpu", 1), ("cuda", 1), ("cpu", 2), ("cuda", 2)):
        setup = prepare(resolve(EngineConfig.from_options(**options, device=device, tensor_parallel_size=size)))
        blocks[device, size] = setup.num_blocks
        assert (setup.segment_layout.kv_bytes != ()) == (device == "cpu" and size == 2)
    # 4 layers x (24 + 8) elements x 4 bytes, 16 tokens a block; host memory holds half of it per rank.
    assert blocks["cpu", 1] == blocks["cuda", 1] == blocks["cuda", 2] == (1 << 20) // (4 * 32 * 4 * 16)
    assert blocks["cpu", 2] == 2 * blocks["cpu", 1]
