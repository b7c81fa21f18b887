"""GPUs as data, and what is decided for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from shardline.deployment.deployment import Deployment, FixedPool, MeasuredPool
from shardline.deployment.kv_budget import gpu_room
from shardline.deployment.machine import Machine
from shardline.deployment.segment import segment_layout
from shardline.models.sizes import kv_bytes_per_token, step_bytes
from shardline.weights.base import PLAIN, FormatChoice
from tests.deployment.machines import GIB, gpu, host, machine, resolve_on
from tests.models.checkpoints import make_checkpoint
from tests.runtime.loader.packer import pack_checkpoint

ONE = machine((8 * GIB, 7 * GIB))
TWO = machine((8 * GIB, 7 * GIB), (8 * GIB, 7 * GIB))


def pool(deployment: Deployment) -> int:
    assert isinstance(deployment.cache.pool, FixedPool)
    return deployment.cache.pool.num_blocks


def test_auto_takes_the_gpu_that_is_there() -> None:
    assert resolve_on(machine()).device == "cpu"
    resolved = resolve_on(machine((8 * GIB, 8 * GIB)))
    assert resolved.device == "cuda"
    assert resolved.collectives == "nccl"
    assert resolved.reasons[0] == "device cuda (this host has 1 x NVIDIA H100)"
    assert resolve_on(machine((8 * GIB, 8 * GIB)), device="cpu").device == "cpu"


def test_replicas_take_gpus_in_turn() -> None:
    eight = machine(*((80 * GIB, 79 * GIB),) * 8)
    resolved = resolve_on(eight, tensor_parallel_size=2, data_parallel_size=4)
    assert resolved.gpus_of(0) == "0,1"
    assert resolved.gpus_of(3) == "6,7"
    named = Machine((host(*(gpu(8 * GIB, 7 * GIB, identifier=name) for name in ("5", "GPU-1", "0"))),))
    assert resolve_on(named, data_parallel_size=2).gpus_of(1) == "GPU-1"
    assert resolve_on(named, tensor_parallel_size=3).gpus_of(0) == "5,GPU-1,0"
    assert resolve_on(ONE, device="cpu").gpus_of(0) is None
    assert resolve_on(ONE, collectives="gloo", tensor_parallel_size=2).gpus_of(0) is None, "all are seen"


def places(resolved: Deployment) -> list[list[tuple[int, int]]]:
    return [[(place.host, place.device) for place in engine] for engine in resolved.placements]


def test_consecutive_ranks_fill_hosts() -> None:
    node = host(*(gpu(80 * GIB, 79 * GIB) for _ in range(8)))
    two_nodes = Machine((node, node))
    replicas = resolve_on(two_nodes, tensor_parallel_size=4, data_parallel_size=2, cpu_threads=1)
    assert places(replicas) == [[(0, gpu) for gpu in range(1, 5)], [(1, gpu) for gpu in range(1, 5)]]
    stages = resolve_on(two_nodes, tensor_parallel_size=8, pipeline_parallel_size=2)
    assert places(stages) == [[(host, gpu) for host in range(2) for gpu in range(1, 9)]]
    assert stages.gpus_of(0, 1) == "0,1,2,3,4,5,6,7"
    assert stages.remote_ranks(0) == list(range(8, 16))
    assert [stages.local_rank(0, rank) for rank in (0, 7, 8, 15)] == [0, 7, 0, 7]
    with pytest.raises(ValueError, match="32 ranks and the 2 nodes 16 GPUs"):
        resolve_on(two_nodes, tensor_parallel_size=8, data_parallel_size=4)
    with pytest.raises(ValueError, match="2 nodes are more than the 1 ranks of this layout; use --nnodes 1"):
        resolve_on(two_nodes)
    on_cpu = resolve_on(two_nodes, device="cpu", tensor_parallel_size=2)
    assert places(on_cpu) == [[(0, 0), (1, 0)]]
    assert any("wait" in warning and "network" in warning for warning in on_cpu.warnings)
    assert not on_cpu.cache.latents_shared


def test_shares_follow_devices_and_replicas() -> None:
    small, large = (host(*(gpu(80 * GIB, 79 * GIB) for _ in range(count))) for count in (2, 6))
    uneven = resolve_on(Machine((small, large)), tensor_parallel_size=2, pipeline_parallel_size=4)
    assert [place[0] for place in places(uneven)[0]] == [0, 0, 1, 1, 1, 1, 1, 1]
    groups = resolve_on(Machine((host(), host())), tensor_parallel_size=2, pipeline_parallel_size=3)
    assert [place[0] for place in places(groups)[0]] == [0, 0, 1, 1, 1, 1], "tensor-parallel groups stay whole"
    front_only = Machine((host(), replace(host(), num_replicas=3)))
    away = resolve_on(front_only, data_parallel_size=3)
    assert [place[0][0] for place in places(away)] == [1, 1, 1]


def test_the_estimate_is_what_weights_and_activations_leave_of_the_share() -> None:
    devices = [gpu(8 * GIB, 7 * GIB)]
    sizes = {share: gpu_room(devices, 1, share, 20_000_000, 30_000_000) for share in (0.5, 0.9)}
    assert sizes[0.9] - sizes[0.5] == int(8 * GIB * 0.5) - int(8 * GIB * (1 - 0.9))
    assert 6 * GIB < sizes[0.9] < 6.2 * GIB
    for share in sizes:
        assert resolve_on(ONE, gpu_memory_utilization=share).cache.pool == MeasuredPool(share)


def test_pools_of_a_size_that_was_asked_for_are_not_measured() -> None:
    assert pool(resolve_on(ONE, device="cuda", num_gpu_blocks_override=170)) == 171
    assert pool(resolve_on(ONE, device="cuda", kv_cache_memory="1GiB")) > 1000


def test_an_automatic_length_leaves_room_for_what_is_measured() -> None:
    whole = resolve_on(ONE, device="cpu", kv_cache_memory="1GiB")
    request = whole.max_model_len * kv_bytes_per_token(whole.spec, whole.grid.place(0), whole.stages, whole.dtype)
    activations = step_bytes(whole.spec, whole.dtype, 2048, 128)
    needed = whole.weights[0].num_bytes + activations + int(8 * GIB * (1.0 - 0.9))
    lengths = {}
    for asked in (None, "auto"):
        # Half a request fits by the estimate.
        half = machine((8 * GIB, needed + request // 2))
        try:
            lengths[asked] = resolve_on(half, device="cuda", max_model_len=asked).max_model_len
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
def test_what_a_gpu_cannot_is_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        resolve_on(ONE, device="cuda", **options)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_a_gpu_keeps_keys_and_values_in_fp8(name: str, tmp_path: Path) -> None:
    options = {"device": "cuda", "kv_cache_memory": "8MiB", "max_model_len": 64, "kv_cache_dtype": name}
    setup = resolve_on(TWO, **options)
    assert setup.cache.dtype == "float8_e4m3fn"
    assert pool(setup) == (8 << 20) // (8 * 8 * (32 + 4) * 2 * 16)  # a byte each, and a scale
    latents = str(make_checkpoint("deepseek_v2", tmp_path))
    setup = resolve_on(TWO, **{**options, "kv_cache_memory": "1MiB"}, model=latents)
    assert pool(setup) == (1 << 20) // (4 * (24 + 2 * 8 + 4) * 16)  # what is rotated stays in bf16


def test_the_bits_that_a_checkpoint_has_packed_are_kept(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path / "model")
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    pack_checkpoint(model, tmp_path / "packed", tmp_path / "plain", config)
    options = {"device": "cuda", "num_gpu_blocks_override": 32, "model": str(tmp_path / "packed")}
    resolved = resolve_on(TWO, **options)
    assert resolved.weight_format == FormatChoice("packed", 32)
    assert resolved.keeps_packed
    on_cpu = resolve_on(TWO, **{**options, "device": "cpu"})
    assert on_cpu.weight_format == FormatChoice("packed", 32, packs_all=True)
    for scheme, name in (("none", "plain"), ("int8", "int8_fast"), ("int4", "int4_fast")):
        chosen = resolve_on(TWO, **options, quantization=scheme)
        assert chosen.weight_format.name == name
        assert not chosen.keeps_packed
    dummy = resolve_on(TWO, **options, load_format="dummy")
    assert dummy.weight_format == PLAIN
    with pytest.raises(ValueError, match="use --numerics exact, or --quantization none"):
        resolve_on(TWO, **options, numerics="fast", tensor_parallel_size=2)


def test_nccl_needs_gpus() -> None:
    with pytest.raises(ValueError, match="'nccl' needs GPUs"):
        resolve_on(TWO, device="cpu", collectives="nccl")


def test_experts_are_split_over_gpus_or_whole(tmp_path: Path) -> None:
    options = {"model": str(make_checkpoint("mixtral", tmp_path)), "device": "cuda", "tensor_parallel_size": 2}
    for is_whole in (False, True):
        resolved = resolve_on(TWO, **options, enable_expert_parallel=is_whole)
        assert resolved.collectives == "nccl"
        assert resolved.tries_symmetric_memory
    by_name = resolve_on(TWO, **options, collectives="nccl")
    assert by_name.collectives == "nccl"
    assert not by_name.tries_symmetric_memory


def test_ranks_share_a_gpu_over_gloo() -> None:
    rooms = {}
    for size in (1, 2, 4):
        options = {"device": "cuda", "collectives": "gloo", "tensor_parallel_size": size}
        resolved = resolve_on(ONE, **options)
        assert any("test mode" in warning for warning in resolved.warnings)
        assert resolved.collectives == "gloo"
        assert isinstance(resolved.cache.pool, FixedPool), "ranks that share a GPU do not measure"
        assert {place.device for place in resolved.placements[0]} == {1}
        held = max(rank.num_bytes for rank in resolved.weights)
        activations = step_bytes(resolved.spec, resolved.dtype, 2048, 128)
        rooms[size] = gpu_room([gpu(8 * GIB, 7 * GIB)], size, 0.9, held, activations)
    assert 3 * GIB < rooms[2] < rooms[1] / 1.9
    assert 1.4 * GIB < rooms[4] < rooms[2] / 1.9


def test_every_gpu_holds_all_latents(tmp_path: Path) -> None:
    options = {"model": str(make_checkpoint("deepseek_v2", tmp_path)), "max_model_len": 64, "kv_cache_memory": "1MiB"}
    options["block_size"] = 16
    blocks = {}
    for device, size in (("cpu", 1), ("cuda", 1), ("cpu", 2), ("cuda", 2)):
        setup = resolve_on(TWO, **options, device=device, tensor_parallel_size=size)
        blocks[device, size] = pool(setup)
        assert (segment_layout(setup, 0, 0).kv_bytes != ()) == (device == "cpu" and size == 2)
    # 4 layers x (24 + 8) elements x 4 bytes, 16 tokens a block; host memory holds half of it per rank.
    assert blocks["cpu", 1] == blocks["cuda", 1] == blocks["cuda", 2] == (1 << 20) // (4 * 32 * 4 * 16)
    assert blocks["cpu", 2] == 2 * blocks["cpu", 1]


def test_a_gpu_that_is_not_there_is_refused_with_the_fix() -> None:
    for collectives in ("auto", "gloo"):
        with pytest.raises(
            ValueError, match="needs a GPU, and nvidia-smi shows none on this host; use --device cpu, or"
        ):
            resolve_on(machine(), device="cuda", collectives=collectives)
    with pytest.raises(ValueError, match=r"neither nvidia-smi nor torch shows one on this host; use --device cpu$"):
        resolve_on(machine(), device="cuda", kernels="torch")


def test_unlike_gpus_are_refused_or_told() -> None:
    ampere = gpu(80 * GIB, 79 * GIB, name="NVIDIA A100", capability="sm_80")
    hopper, larger = (
        gpu(size * GIB, size * GIB, name=name) for size, name in ((80, "NVIDIA H100"), (141, "NVIDIA H200"))
    )
    unlike, alike = Machine((host(ampere, hopper),)), Machine((host(hopper, larger),))
    for layout in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        with pytest.raises(
            ValueError, match=r"on NVIDIA A100 and NVIDIA H100, whose .*VISIBLE_DEVICES, or use --numeri"
        ):
            resolve_on(unlike, **{layout: 2})
    with pytest.raises(ValueError, match="on NVIDIA H100 and NVIDIA H200, whose results have unlike bits"):
        resolve_on(alike, tensor_parallel_size=2, kernels="torch")
    for where, options in ((unlike, {"numerics": "fast"}), (alike, {})):
        resolved = resolve_on(where, tensor_parallel_size=2, **options)
        assert any("wait for the slowest" in warning for warning in resolved.warnings)
    assert resolve_on(alike).reasons[0] == "device cuda (this host has 1 x NVIDIA H100 and 1 x NVIDIA H200)"
    assert not resolve_on(unlike).warnings, "the second GPU has no rank"


def test_a_small_gpu_without_ranks_does_not_count() -> None:
    two = Machine((host(gpu(80 * GIB, 79 * GIB), gpu(20 << 20, 20 << 20)),))
    assert resolve_on(two).device == "cuda"
    assert pool(resolve_on(two, kv_cache_memory="1GiB")) > 1000
    with pytest.raises(ValueError, match="a GPU has to hold"):
        resolve_on(two, data_parallel_size=2)


def test_a_gpu_that_torch_cannot_use_is_told() -> None:
    why = "this host has 1 GPU (NVIDIA H100), but torch 2.13.0+cpu was built without CUDA; install torch with CUDA"
    where = Machine((host(unusable_gpus=why),))
    resolved = resolve_on(where)
    assert resolved.device == "cpu"
    [warning] = resolved.warnings
    assert why in warning
    assert "--device cpu" in warning
    assert resolve_on(where, device="cpu").warnings == ()
    with pytest.raises(ValueError, match="built without CUDA; install torch with CUDA, or use --device cpu"):
        resolve_on(where, device="cuda")


def test_fp8_needs_a_gpu_that_computes_in_it() -> None:
    old = Machine((host(gpu(80 * GIB, 79 * GIB, name="NVIDIA A100", capability="sm_80")),))
    for option in ("quantization", "kv_cache_dtype"):
        with pytest.raises(ValueError, match=r"fp8 needs .*\(sm_89 or later\), and NVIDIA A100 is sm_80; use int8"):
            resolve_on(old, **{option: "fp8"})
        for capability in ("sm_89", "sm_90", "sm_120"):
            new = Machine((host(gpu(80 * GIB, 79 * GIB, capability=capability)),))
            resolve_on(new, **{option: "fp8"})
        resolve_on(old, kernels="torch", **{option: "fp8"})
    turing = Machine((host(gpu(16 * GIB, 15 * GIB, name="Tesla T4", capability="sm_75")),))
    with pytest.raises(ValueError, match=r"bfloat16 needs .*and Tesla T4 is sm_75; use --dtype float32, or serve "):
        resolve_on(turing, dtype="bfloat16")
    chosen = resolve_on(old, quantization="int8")
    assert chosen.weight_format.name == "int8_fast"
    assert "weights int8_fast (what GPUs have for int8)" in chosen.reasons
    with pytest.raises(ValueError, match="int8_w8a16 is for CPUs; use none, int8_fast or int4_fast, or --device cpu"):
        resolve_on(old, quantization="int8_w8a16")
