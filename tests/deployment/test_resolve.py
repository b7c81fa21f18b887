"""Every choice is made, every refusal given, before anything is loaded."""

from __future__ import annotations

import builtins
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from shardline.checkpoints.description import read_model
from shardline.checkpoints.lookup import decoder_spec
from shardline.config.engine import EngineConfig
from shardline.deployment import here
from shardline.deployment.cache import choose_block_size
from shardline.deployment.deployment import Deployment, FixedPool
from shardline.deployment.here import resolve_here
from shardline.deployment.resolve import resolve
from shardline.models.attention import GQA
from shardline.models.kv_groups import KVGroup
from shardline.models.parts import KVDType
from shardline.models.spec import DecoderSpec
from tests.deployment.machines import GIB, machine, resolve_on
from tests.models.checkpoints import FAMILIES, make_checkpoint, make_variant


def setup(**options: object) -> Deployment:
    return resolve_on(machine(), **options)


def pool(deployment: Deployment) -> int:
    assert isinstance(deployment.cache.pool, FixedPool)
    return deployment.cache.pool.num_blocks


def test_resolving_is_repeatable_and_final() -> None:
    options = {"tensor_parallel_size": 3}
    resolved = setup(**options)
    assert setup(**options) == resolved
    assert resolved.executor == "mp"
    assert Path(resolved.model.folder).is_dir()
    assert resolved.dtype == "bfloat16"


def leaves(value: object) -> Iterator[object]:
    """Every value of a deployment but the model's own, which may have no window or no bias. None may draft."""
    if isinstance(value, DecoderSpec | KVGroup):
        return
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            if name not in ("draft", "drafting"):
                yield from leaves(getattr(value, name))
    elif isinstance(value, tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def test_drafts() -> None:
    asked = {"method": "ngram", "num_speculative_tokens": 7}
    deployment = resolve_on(machine(), speculative_config=asked, max_num_seqs=4)
    assert (deployment.max_in_flight, deployment.limits.max_samples) == (2, 8)
    assert resolve_on(machine(), speculative_config=asked, pipeline_parallel_size=2).max_in_flight == 2
    assert not resolve_on(machine()).limits.drafts
    gpu, of_model = machine((80 * GIB, 79 * GIB)), {"model": "demo-draft", "num_speculative_tokens": 3}
    for kernels in ("auto", "triton"):
        with pytest.raises(ValueError, match="the Triton kernels have no drafts yet"):
            resolve_on(gpu, speculative_config=asked, kernels=kernels)
    assert resolve_on(gpu, speculative_config=asked, kernels="torch").limits.drafts
    with pytest.raises(ValueError, match="draft models and heads run on CPUs only so far; use the method ngram"):
        resolve_on(gpu, speculative_config=of_model, kernels="torch")
    assert resolve_on(machine(), speculative_config=of_model, kernels="torch").draft


def test_adapters_are_those_of_the_cpu_and_of_torch() -> None:
    gpu = machine((80 * GIB, 79 * GIB))
    for kernels in ("auto", "triton"):
        with pytest.raises(ValueError, match="the Triton kernels have no adapters yet; use --kernels torch"):
            resolve_on(gpu, enable_lora=True, kernels=kernels)
    assert resolve_on(gpu, enable_lora=True, kernels="torch").adapters.num_bytes


def test_torch_on_cpus_keeps_the_lm_head_in_float32_too() -> None:
    def more(dtype: str, **options: str) -> list[int]:
        sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
        own, torch = (
            resolve_on(machine(), kernels=kernels, dtype=dtype, **sizes, **options) for kernels in ("auto", "torch")
        )
        return [of_torch.num_bytes - rank.num_bytes for of_torch, rank in zip(torch.weights, own.weights, strict=True)]

    spec = resolve_on(machine()).spec
    assert more("bfloat16") == [0, 0, 2 * spec.vocab_size * spec.hidden_size, 2 * spec.vocab_size * spec.hidden_size]
    assert more("float32") == more("bfloat16", quantization="int8") == [0] * 4


def test_pipelines_of_cpus_cut_prompts_finer() -> None:
    shares = [resolve_on(one).limits.least_prefill_share for one in (machine(), machine((80 * GIB, 79 * GIB)))]
    assert shares == [32, 128]


@pytest.mark.parametrize("gpus", [(), ((80 * GIB, 79 * GIB),) * 2])
def test_nothing_is_left_open(gpus: tuple[tuple[int, int], ...]) -> None:
    for value in leaves(resolve_on(machine(*gpus), tensor_parallel_size=2)):
        assert value is not None
        assert value != "auto"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_deployment_travels_as_it_is(family: str, tmp_path: Path) -> None:
    model = str(make_checkpoint(family, tmp_path / "model"))
    for gpus in ((), ((80 * GIB, 79 * GIB),) * 4):
        sent = resolve_on(machine(*gpus), model=model, tensor_parallel_size=2, pipeline_parallel_size=2)
        received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Deployment)
        assert received == sent
        assert repr(received.spec) == repr(sent.spec)


def test_a_deployment_of_a_large_model_fits_a_sockets_buffer() -> None:
    """Ranks are started one after another: none may be waited for until it reads."""
    config = {"model_type": "llama", "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8,
              "hidden_size": 16384, "intermediate_size": 53248, "vocab_size": 128256}  # fmt: skip
    assert len(msgspec.msgpack.encode(decoder_spec(config))) < 120_000


def test_resolving_opens_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig.from_options(model=str(make_checkpoint("mixtral", tmp_path)), tensor_parallel_size=2)
    model = read_model(config.model)

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError(f"resolve touched {arguments}")

    with monkeypatch.context() as patch:
        for name in ("open", "read_text", "read_bytes", "stat", "is_file", "is_dir", "iterdir", "glob"):
            patch.setattr(Path, name, refuse)
        patch.setattr(builtins, "open", refuse)
        patch.setattr(os, "stat", refuse)
        patch.setattr(os, "sched_getaffinity", refuse)
        patch.setattr(subprocess, "run", refuse)
        patch.setattr(socket, "gethostname", refuse)
        for where in (machine(), machine((80 * GIB, 79 * GIB), (80 * GIB, 79 * GIB))):
            assert resolve(config, model, where).model.folder == str(tmp_path)


def test_the_pool_is_what_the_memory_holds() -> None:
    small: dict[str, object] = {"kv_cache_memory": "8MiB", "max_model_len": 64, "block_size": 16}
    roomy = setup(**small)
    # 8 layers x 8 KV heads x 32 dims x (keys and values) x 2 bytes, 16 tokens a block.
    assert pool(roomy) == (8 << 20) // (8 * 8 * 32 * 2 * 2 * 16)
    for name in ("int8", "fp8", "fp8_e4m3"):
        bytewise = setup(**small, kv_cache_dtype=name)
        assert pool(bytewise) == (8 << 20) // (8 * 8 * (32 + 4) * 2 * 16)  # a byte each, and a scale
    split = setup(**small, tensor_parallel_size=2)
    assert pool(split) == min(2 * pool(roomy), 128 * 4 + 1)


def test_a_length_that_does_not_fit_is_refused_with_one_that_does() -> None:
    with pytest.raises(ValueError, match=r"--max-model-len 1008 .* raise --kv-cache-memory"):
        setup(kv_cache_memory="8MiB", block_size=16)
    with pytest.raises(ValueError, match=r"--max-model-len 1280 .* raise --num-gpu-blocks-override"):
        setup(num_gpu_blocks_override=40, block_size=32)
    assert setup(kv_cache_memory="8MiB", block_size=16, max_model_len="auto").max_model_len == 1008
    with pytest.raises(ValueError, match="too few for any request"):
        setup(kv_cache_memory="100KiB")


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="2 x 11"):
        resolve_on(machine(free_memory=20_000_000), data_parallel_size=2)
    with pytest.raises(
        ValueError, match=r"the weights and adapters need .* use a lower --max-loras or --max-lora-rank"
    ):
        resolve_on(machine(free_memory=20_000_000), enable_lora=True, max_loras=1000)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor_parallel_size": 9}, "use 8"),
        ({"pipeline_parallel_size": 9}, "use 8 or fewer"),
        ({"pipeline_parallel_size": 2, "pipeline_stages": "8"}, "2 positive counts"),
        ({"pipeline_parallel_size": 2, "pipeline_stages": "a,b"}, "10,12,10"),
        ({"max_model_len": 5000}, "2048"),
        ({"enable_expert_parallel": True}, "mixture-of-experts"),
        ({"distributed_executor_backend": "uni", "tensor_parallel_size": 2}, "use 'mp'"),
    ],
)
def test_refusals(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        setup(**options)


def test_experts_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    model = str(make_checkpoint("mixtral", tmp_path / "model", num_local_experts=3))
    whole = {"model": model, "enable_expert_parallel": True}
    assert setup(tensor_parallel_size=3, **whole).expert_parallel
    with pytest.raises(ValueError, match=r"4 ranks .* cannot share 3; use 3 ranks a stage or fewer"):
        setup(tensor_parallel_size=4, **whole)
    assert setup(model=model, tensor_parallel_size=4).grid.tensor == 4
    moved = {**whole, "tensor_parallel_size": 3, "enable_eplb": True}
    assert setup(**moved, eplb_config='{"num_redundant_experts": 6}').expert_balancing.num_redundant_experts == 6
    with pytest.raises(ValueError, match="num_redundant_experts 7 is too many: with 6, each rank has all 3 experts"):
        setup(**moved, eplb_config='{"num_redundant_experts": 7}')


def test_a_missing_expert_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.2.mlp.experts.7.down_proj.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.experts\.7\.down_proj\.weight is missing"):
        setup(model=str(model))


def test_memory_that_is_asked_for_must_be_there() -> None:
    with pytest.raises(ValueError, match="lower --kv-cache-memory"):
        setup(num_gpu_blocks_override=10**9)
    with pytest.raises(ValueError, match=r"a KV cache of 1024\.00 TiB a rank need .*, but this host has "):
        setup(kv_cache_memory="1024TiB")


def test_memory_that_requests_cannot_use_is_named() -> None:
    [reason] = [one for one in setup(kv_cache_memory="16GiB").reasons if "KV cache" in one]
    assert reason.endswith("of the 16.00 GiB set for the KV cache (requests use no more)")
    assert not any("KV cache" in one for one in setup(kv_cache_memory="1MiB", max_model_len=64).reasons)


def test_a_rope_that_follows_the_length_wants_a_length(tmp_path: Path) -> None:
    """Else the layout, by the memory it leaves, would choose the tokens."""
    model = str(make_variant("phi3-longrope-long", tmp_path / "model"))
    options = {"model": model, "kv_cache_memory": "32KiB", "block_size": 16}
    with pytest.raises(ValueError, match="set it yourself"):
        setup(max_model_len="auto", **options)


@pytest.mark.parametrize("name", ["half", "float16"])
def test_float16_is_computed_in_float32(name: str) -> None:
    resolved = setup(dtype=name)
    assert resolved.dtype == "float32"
    assert any("dtype float32 (no kernel computes in float16; it holds every" in one for one in resolved.reasons)


def test_small_blocks_become_the_smallest_there_are() -> None:
    resolved = setup(block_size=8)
    assert resolved.cache.block_size == 16
    assert "block_size 16 (the smallest; 8 was asked for)" in resolved.reasons


def test_pages_that_products_cannot_read_are_refused() -> None:
    refused = "--block-size 24 is not a multiple of 16, as blocks are with all kernels; 16 and 32 would work"
    for kernels in ("auto", "torch"):
        with pytest.raises(ValueError, match=refused):
            setup(block_size=24, kernels=kernels)
    spec = setup().spec
    layer = spec.layers[0]
    assert isinstance(layer.attention, GQA)
    odd = replace(spec, layers=(replace(layer, attention=layer.attention.changed(head_dim=15)),))
    assert choose_block_size(None, odd, "float32", "float32", "cpu") == 32
    with pytest.raises(ValueError, match=r"keys of 15 elements.*--dtype float32 would work"):
        choose_block_size(None, odd, "bfloat16", "bfloat16", "cpu")


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype", "device", "tokens"),
    [(64, "bfloat16", "cpu", 32), (128, "bfloat16", "cpu", 16), (64, "int8", "cpu", 64), (64, "bfloat16", "cuda", 16)],
)
def test_blocks_are_pieces_that_a_cpu_reads_at_full_speed(
    head_dim: int, kv_dtype: KVDType, device: str, tokens: int
) -> None:
    spec = setup().spec
    layer = spec.layers[0]
    assert isinstance(layer.attention, GQA)
    wide = replace(spec, layers=(replace(layer, attention=layer.attention.changed(head_dim=head_dim)),))
    assert choose_block_size(None, wide, "bfloat16", kv_dtype, device) == tokens
    assert choose_block_size(48, wide, "bfloat16", kv_dtype, device) == 48


def test_a_folder_called_demo_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("llama", tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    assert setup(model="./demo").model.folder == str(tmp_path / "demo")


def test_a_window_bounds_what_a_long_request_holds(tmp_path: Path) -> None:
    model = str(make_checkpoint("mistral", tmp_path / "model", max_position_embeddings=4096))
    wide = setup(model=model, num_gpu_blocks_override=20, max_num_batched_tokens=32)
    assert wide.max_model_len == 4096


def test_a_replica_on_cpus_keeps_to_4_gib() -> None:
    """Old prefixes would fill half of the machine. The longest request and some others always fit."""
    for layout in ({}, {"tensor_parallel_size": 2}, {"data_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        resolved = setup(max_num_seqs=4000, **layout)
        of_replica = sum(resolved.cache.block_bytes[: resolved.grid.replica_size])
        assert 4 * GIB - of_replica < pool(resolved) * of_replica <= 4 * GIB
        line = "; ".join(resolved.reasons)
        assert "at most 4.00 GiB a replica, or what its longest request and 16 of 2,048 tokens need" in line
        assert "--kv-cache-memory gives more, here up to" in line
    asked = setup(max_num_seqs=4000, kv_cache_memory="6GiB")
    assert pool(asked) * asked.cache.block_bytes[0] == 6 * GIB
    measured = setup(max_num_seqs=4000, kv_cache_memory="20GiB")
    small = resolve_on(machine(free_memory=4 * GIB), max_num_seqs=4000)
    assert pool(small) * small.cache.block_bytes[0] < 2 * GIB
    assert pool(measured) > pool(asked)


def test_a_long_request_and_16_more_fit_on_cpus(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 4, "num_key_value_heads": 2, "max_position_embeddings": 1 << 22}
    model = str(make_checkpoint("llama", tmp_path / "model", **sizes))
    resolved = setup(model=model)
    assert resolved.max_model_len == 1 << 22
    tokens = (pool(resolved) - 1) * resolved.cache.block_size
    assert tokens == (1 << 22) + 16 * 2048
    assert pool(resolved) * resolved.cache.block_bytes[0] > 4 * GIB


def test_stages_by_hand() -> None:
    spans = setup(pipeline_parallel_size=3, pipeline_stages="1,5,2").stages
    assert [(span.start, span.stop) for span in spans] == [(0, 1), (1, 6), (6, 8)]


def test_what_was_chosen_is_told_with_its_reason() -> None:
    line = "; ".join(setup(pipeline_parallel_size=2).reasons)
    for words in (
        "dtype bfloat16 (the checkpoint's is bfloat16)",
        "max_model_len 2048 (all that the model has)",
        "executor mp (2 ranks a replica)",
        "8 threads a rank (16 cores, ranks in all: 2)",
        "pipeline_stages 4,4 (balanced",
        "of KV cache a rank",
        "block_size 32 (16 keys of a head take less than 4 KiB)",
    ):
        assert words in line
    asked = {"dtype": "bfloat16", "max_model_len": 2048, "distributed_executor_backend": "mp", "cpu_threads": 8}
    asked["block_size"] = 32
    assert setup(pipeline_parallel_size=2, pipeline_stages="4,4", kv_cache_memory="1GiB", **asked).reasons == ()


def test_the_log_has_reasons_and_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    resolve_here(EngineConfig.from_options(device="cpu", cpu_threads=1, tensor_parallel_size=8))
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("chosen: dtype bfloat16") for line in lines)


def test_a_layout_that_cannot_be_is_refused_before_a_model_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "read_models", lambda config: pytest.fail("the model was read"))
    with pytest.raises(ValueError, match="'nccl' needs GPUs"):
        resolve_here(EngineConfig.from_options(device="cpu", collectives="nccl"))


def test_cores_that_are_too_few_are_told() -> None:
    [warning] = resolve_on(machine(cores=2), tensor_parallel_size=4).warnings
    assert warning.startswith("4 ranks of 1 threads share 2 cores and wait for each other; use fewer ranks")
    with pytest.raises(ValueError, match="cpu_threads 3 is more than the 2 cores"):
        resolve_on(machine(cores=2), cpu_threads=3)


def test_flags_of_several_nodes_on_one_node_are_told() -> None:
    [warning] = resolve_on(machine(), master_addr="10.0.0.1").warnings
    assert warning.startswith("--master-addr has no effect on one node; say with --nnodes how many nodes there are")
