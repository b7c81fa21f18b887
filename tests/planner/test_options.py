"""Engine flags of `shardline plan`: each counts and stands in the commands, or is refused."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from shardline.cli.flags import engine_config
from shardline.cli.main import build_parser, main
from shardline.config.engine import option_names
from shardline.planner.options import is_option

LLAMA_70B = "meta-llama/Llama-3.1-70B-Instruct"
WORDS = (LLAMA_70B, "--gpus", "4xH100", "--max-model-len", "16384", "-tp", "4")


def plan(capsys: pytest.CaptureFixture[str], *words: str, base: tuple[str, ...] = WORDS) -> dict[str, Any]:
    assert main(["plan", *base, *words, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def best(found: dict[str, Any]) -> dict[str, Any]:
    return dict(found["layouts"][found["recommended"]])


def test_host_memory_for_evicted_blocks_is_set_aside(capsys: pytest.CaptureFixture[str]) -> None:
    """How much the nodes have is not known, so it is only said."""
    words = ("plan", LLAMA_70B, "--gpus", "8xH100", "-tp", "4", "-dp", "2", "--kv-offloading-size", "200")
    assert main([*words]) == 0
    assert "host memory set aside: 400.0 GiB for evicted blocks" in capsys.readouterr().out


def test_a_plan_knows_every_option_of_the_engine() -> None:
    assert [name for name in option_names() if not is_option(name)] == []


@pytest.mark.parametrize(
    ("words", "ours", "theirs"),
    [
        ("--max-num-seqs 9", "--max-num-seqs 9", "--max-num-seqs 9"),
        ("--max-num-batched-tokens 512", "--max-num-batched-tokens 512", "--max-num-batched-tokens 512"),
        ("--gpu-memory-utilization 0.9", "--gpu-memory-utilization 0.9", "--gpu-memory-utilization 0.9"),
        ("--block-size 32", "--block-size 32", "--block-size 32"),
        ("--kv-cache-memory 8GiB", "--kv-cache-memory 8GiB", "--kv-cache-memory-bytes 8589934592"),
        ("--num-gpu-blocks-override 9000", "--num-gpu-blocks-override 9000", "--num-gpu-blocks-override 9000"),
        ("--enable-chunked-prefill", "--enable-chunked-prefill", "--enable-chunked-prefill"),
        ("--no-enable-prefix-caching", "--no-enable-prefix-caching", "--no-enable-prefix-caching"),
        ("--dtype bfloat16", "--dtype bfloat16", "--dtype bfloat16"),
        ("--numerics fast", "--numerics fast", ""),
        ("--numerics exact", "--numerics exact", "# --numerics"),
        ("--router-policy cache_aware", "--router-policy cache_aware", "# --router-policy"),
        ("--quantization none", "--quantization none", ""),
        ("--kv-cache-dtype fp8", "--kv-cache-dtype fp8", "--kv-cache-dtype fp8"),
        ("--seed 3 --tokenizer a/b", "--tokenizer a/b --seed 3", "--tokenizer a/b --seed 3"),
        ("--step-timeout 9", "--step-timeout 9.0", "# --step-timeout"),
        (
            "--kv-offloading-size 200 --kv-offloading-dir /kv",
            "--kv-offloading-size 200.0 --kv-offloading-dir /kv",
            "# --kv-offloading-dir",
        ),
    ],
)
def test_given_flags_stand_in_the_commands(
    words: str, ours: str, theirs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(capsys, *words.split())
    assert ours in found["commands"]["shardline"]
    where = found["command_notes"] if theirs.startswith("# ") else found["commands"]
    assert theirs.removeprefix("# ") in where["vllm"]


@pytest.mark.slow
@pytest.mark.parametrize("gpus", ["4xH100", "2x8xH100", "3x8xA100-80GB"])
def test_serve_takes_the_commands(gpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    large = "meta-llama/Llama-3.1-405B"
    for model, goal in ((large, "cost"), (large, "throughput"), (LLAMA_70B, "latency")):
        found = plan(capsys, "--goal", goal, base=(model, "--gpus", gpus))
        if found["commands"]["shardline"] is not None:
            args = build_parser().parse_args(shlex.split(found["commands"]["shardline"])[1:])
            engine_config(args)
            note = found["command_notes"]["shardline"]
            assert ("--nnodes" in found["commands"]["shardline"]) == bool(note and "node 0" in note)


def test_the_size_of_the_cache_counts(capsys: pytest.CaptureFixture[str]) -> None:
    for engine in ("shardline", "vllm"):
        words = ("--quantization", "none", "--kv-cache-dtype", "auto", "--engine", engine)
        free = best(plan(capsys, *words))
        given = best(plan(capsys, *words, "--kv-cache-memory", "8GiB"))
        assert given["kv_bytes"] == pytest.approx(8 << 30, rel=1e-3)
        assert given["kv_tokens"] == pytest.approx(free["kv_tokens"] * given["kv_bytes"] / free["kv_bytes"], rel=0.01)
        blocks = best(plan(capsys, *words, "--num-gpu-blocks-override", "5000", "--block-size", "32"))
        assert blocks["kv_tokens"] == pytest.approx(160_000, rel=1e-3)
        much = plan(capsys, *words, "--kv-cache-memory", "60GiB")
        assert much["recommended"] is None
        refusals = {
            "shardline": "weights and a KV cache of 60.00 GiB a rank need",
            "vllm": "the KV cache of 60.0 GiB does not fit",
        }
        assert refusals[engine] in much["layouts"][0]["why_not"]


def test_fast_numerics_move_less(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--quantization", "none", "--kv-cache-dtype", "auto", "--link", "pcie", "--running", "32")
    exact, fast = (best(plan(capsys, *words, "--numerics", one)) for one in ("exact", "fast"))
    assert exact["link_share"] != fast["link_share"]


def test_stages_count(capsys: pytest.CaptureFixture[str]) -> None:
    base = (LLAMA_70B, "--gpus", "4xH100", "-pp", "2", "-tp", "2")
    even, odd = (plan(capsys, "--pipeline-stages", one, base=base) for one in ("40,40", "50,30"))
    assert best(odd)["weight_bytes"] > 1.1 * best(even)["weight_bytes"]
    assert odd["commands"]["shardline"].endswith("--pipeline-stages 50,30")
    assert odd["commands"]["vllm"].startswith("VLLM_PP_LAYER_PARTITION=50,30 vllm serve ")


def test_half_precision_is_vllms(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--dtype", "half")
    assert found["vllm_only"] == "dtype float16 is not supported; use bfloat16"
    assert found["commands"]["shardline"] is None
    assert found["commands"]["vllm"].endswith("--dtype half")


def test_a_checkpoint_in_float32_has_figures_in_16_bits(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM halves float32, and this engine does if it is told to."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    base = (str(tmp_path), "--gpus", "1xL4", "--quantization", "none", "--kv-cache-dtype", "auto")
    plain, told = plan(capsys, base=base), plan(capsys, "--dtype", "bfloat16", base=base)
    assert "runs in float32 here" in plain["vllm_only"]
    assert told["vllm_only"] is None
    assert best(told)["weight_bytes"] == pytest.approx(best(plain)["weight_bytes"], rel=0.01)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--max-model-len auto", "--max-model-len auto: a plan needs a number of tokens"),
        ("--no-enable-chunked-prefill", "--no-enable-chunked-prefill: the figures are of prompts in chunks"),
        ("--dtype float32", "--dtype float32: GPUs' rates"),
        ("--runner pooling", "--runner pooling: a plan is for models that generate"),
        ("--check-finite", "--check-finite: it is for finding faults"),
        ("--nnodes 2", "--nnodes 2: --gpus says which nodes there are"),
        ("--context-parallel-size 2", "--context-parallel-size 2: engines start it on CPUs only so far"),
        ("--device cpu", "--device cpu: a plan is for the GPUs of --gpus"),
        ("--collectives gloo", "it is a test mode"),
        ("--collectives shm", "use 'nccl' with device cuda"),
        ("--distributed-executor-backend threads", "is for the CPU"),
        ("--block-size 17", "--block-size 17 is not a multiple of 16"),
        ("--block-size 48 --engine vllm", "vLLM has no blocks of 48 tokens"),
        ("--kv-cache-dtype int8 --engine vllm", "vLLM has no KV cache in int8"),
        ("--quantization fp8_w8a8", "weights 'fp8_w8a8': known are bf16, fp8"),
        ("--pipeline-stages 40,41 -pp 2 -tp 2", "pipeline_stages '40,41' must be 2 positive counts"),
        ("--revision abc", "with --revision abc is not among the shipped facts"),
        ("--replicas 3", "--replicas needs --simulate"),
        ("--rate 1 --running 3", "--running and --rate are two ways to state the load"),
        ("--simulate --running 3", "--running is a load that --simulate does not have"),
        ("--simulate --rate 1 --max-num-waiting 3", "--max-num-waiting has no effect with --simulate"),
        ("--simulate --trace /x --prefix-len 3", "--prefix-len has no effect with --trace"),
        ("--validate /x.csv", "--gpus has no effect with --validate"),
        ("-pp 81 -tp 1 --gpus 2x64xH100", "no layout of 2x64xH100-80GB-SXM5 has the given sizes"),
    ],
)
def test_other_flags_are_refused_in_one_line(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = [word for word in WORDS if not (word in ("--max-model-len", "16384") and "--max-model-len" in words)]
    assert main(["plan", *base, *words.split()]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_plan_for_this_host_takes_no_other_load(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "Qwen/Qwen3-0.6B", "--gpus", "here", "--rate", "3"]) == 2
    assert "--rate has no effect with --gpus here" in capsys.readouterr().err
    assert main(["plan", "Qwen/Qwen3-0.6B", "--gpus", "here", "--nnodes", "2"]) == 2
    assert "--gpus here is a plan for one host" in capsys.readouterr().err
    assert main(["plan", "demo", "--gpus", "here", "--kernels", "torch"]) == 2
    assert "a plan has no figures for torch's operations" in capsys.readouterr().err
