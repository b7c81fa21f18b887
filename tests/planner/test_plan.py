"""`shardline plan`: the search, the text, the JSON, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardline import planner
from shardline.cli.main import main
from shardline.config.topology import COORDINATES, GROUPS
from shardline.deployment.resolve import resolve
from shardline.models.communication import NOTHING, TRAFFIC, Traffic
from shardline.planner import report
from shardline.planner import search as search_module
from shardline.planner.catalog import describe, find_model
from shardline.planner.cluster import parse_cluster
from shardline.planner.compare import parse_layout
from shardline.planner.hardware import known_gpus
from shardline.planner.layout import STARTED_AXES, Demand, Layout
from shardline.planner.memory import engine_config, whole_requests
from shardline.planner.path import explain_path, fewest_gpus, tensor_efficiency
from shardline.planner.report import axis_traffic, frontier
from shardline.planner.search import Fixed, Plan, search
from tests.models.checkpoints import make_checkpoint

LLAMA_70B = "meta-llama/Llama-3.1-70B-Instruct"


def found(model: str, gpus: str, demand: Demand, goal: str = "cost", **fixed: Any) -> Plan:
    return search(find_model(model), parse_cluster(gpus, known_gpus()), demand, goal, None, Fixed(**fixed))


def plan_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_what_is_recommended_has_passed_resolve() -> None:
    result = found(LLAMA_70B, "4xH100", Demand(32_768), "throughput")
    assert result.recommended == 0
    best = result.options[0]
    config = engine_config(result.model, best.layout, result.demand, 32_768)
    deployment = resolve(config, describe(result.model), result.cluster.machine(0))
    assert max(rank.num_bytes for rank in deployment.weights) == best.fit.weight_bytes
    assert best.layout.weights == "bf16", "quantization is not chosen if the checkpoint's own format does"
    assert best.layout.kv == "auto"


def test_goals() -> None:
    best = {
        goal: found(LLAMA_70B, "4xH100", Demand(8192), goal).options[0] for goal in ("cost", "latency", "throughput")
    }
    speeds = {goal: option.speed for goal, option in best.items()}
    assert all(speed is not None for speed in speeds.values())
    assert best["latency"].layout.tensor == 4
    assert speeds["latency"].tpot.p50 <= speeds["cost"].tpot.p50  # type: ignore[union-attr]
    assert speeds["throughput"].output_tok_s.p50 >= speeds["latency"].output_tok_s.p50  # type: ignore[union-attr]
    assert best["cost"].cost_per_million is not None


def test_the_lowest_cost_may_need_fewer_bits() -> None:
    result = found(LLAMA_70B, "4xH100", Demand(8192))
    costs = [one.cost_per_million for one in result.options if one.cost_per_million and one.fit.verdict != "tight"]
    assert result.options[0].cost_per_million == min(costs)
    [bits] = [one for one in explain_path(result) if one.question == "fewer bits?"]
    assert "bf16: bf16" in bits.figures
    assert "--quantization none" in bits.answer
    equal = found(LLAMA_70B, "4xH100", Demand(8192, rate=0.5), tensor=4)
    assert equal.options[0].layout.weights == "bf16", "of layouts at one price, the one that keeps the answers"


@pytest.mark.slow
def test_a_checkpoint_that_fits_in_vllm_only_is_planned_for_it() -> None:
    """Experts in FP8 become dense in this engine, and 1.22 TiB do not fit eight H200."""
    result = found("deepseek-ai/DeepSeek-V3", "8xH200", Demand(8192))
    assert "vLLM instead" in result.instead
    best = result.options[0]
    assert (best.layout.engine, best.layout.weights, best.layout.kv) == ("vllm", "fp8", "auto")
    cheapest = min(one.cost_per_million for one in result.options if one.cost_per_million)
    assert best.cost_per_million is not None
    assert cheapest < best.cost_per_million < 1.03 * cheapest, "of nearly equal prices, one that changes no answers"
    assert not found(LLAMA_70B, "1xL4", Demand(8192)).instead, "nothing fits either"


@pytest.mark.slow
def test_a_quantized_checkpoint_may_be_made_dense(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json(capsys, "deepseek-ai/DeepSeek-V3", "--gpus", "8xH200", "--quantization", "none")
    assert {one["verdict"] for one in plan["layouts"]} == {"no"}, "1,342 GB"
    plan = plan_json(capsys, "Qwen/Qwen3-32B-FP8", "--gpus", "1xH100", "--quantization", "none")
    assert plan["layouts"][0]["weight_bytes"] > 60e9
    assert plan["commands"]["shardline"].endswith("--quantization none")
    assert plan["commands"]["vllm"].startswith("vllm serve Qwen/Qwen3-32B-FP8-BF16 ")
    assert "a checkpoint that is not quantized" in plan["command_notes"]["vllm"]


def test_of_replicas_at_one_price_the_fewest_come_first() -> None:
    best = found("Qwen/Qwen3-VL-4B-Instruct", "8xH100", Demand(8192)).options[0]
    assert best.layout.num_gpus == 1


def test_a_demand_that_nothing_meets_recommends_nothing() -> None:
    result = found(LLAMA_70B, "2xA100-80GB", Demand(8192, tpot=0.001))
    assert result.recommended is None
    assert "TPOT 1 ms" in result.options[0].misses


def test_a_demand_within_the_interval_is_a_risk() -> None:
    free = found(LLAMA_70B, "4xH100", Demand(8192, running=8), tensor=4, weights="bf16", kv="auto").options[0].speed
    assert free is not None
    limit = (free.tpot.p50 + free.tpot.p90) / 2
    result = found(LLAMA_70B, "4xH100", Demand(8192, running=8, tpot=limit), tensor=4, weights="bf16", kv="auto")
    assert result.recommended == 0
    assert result.options[0].misses == ""
    assert result.options[0].may_miss.startswith("TPOT")


def test_a_rate_decides_how_many_requests_run() -> None:
    few, many = (
        found(LLAMA_70B, "4xH100", Demand(8192, rate=rate), tensor=4, weights="bf16", kv="auto") for rate in (0.5, 4)
    )
    slow, fast = few.options[0].speed, many.options[0].speed
    assert slow is not None
    assert fast is not None
    assert slow.running < fast.running
    assert slow.tpot.p50 < fast.tpot.p50
    assert fast.output_tok_s.p50 == pytest.approx(4 * 128, rel=0.01)


def test_the_frontier_has_no_dominated_layout() -> None:
    result = found(LLAMA_70B, "4xH100", Demand(8192), "throughput")
    kept = frontier(result.options)
    assert 0 in kept
    assert len(kept) < sum(option.speed is not None for option in result.options)


def test_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpus", "4xH100-80GB", "--link", "pcie", "--max-model-len", "32768", "--rate", "2"]
    assert main(["plan", LLAMA_70B, *words]) == 0
    text = capsys.readouterr().out
    assert "4xH100-80GB-PCIe, one node, pcie 64 GB/s each way, 79.1 GiB usable" in " ".join(text.split())
    assert "tokens does not fit the KV cache" not in text, "refused layouts are for --all"
    assert "  $ shardline serve meta-llama/Llama-3.1-70B-Instruct" in text
    assert "  $ vllm serve meta-llama/Llama-3.1-70B-Instruct" in text
    places = [text.index(part) for part in ("recommended: ", "fits:", "speed:", "price:", "memory of", "\nlayout ")]
    assert places == sorted(places)
    for question in ("one GPU? one node?", "do the heads divide?", "dense or experts?", "which link?"):
        assert places[-2] < text.index(f"\n{question} ") < places[-1]
    assert main(["plan", LLAMA_70B, *words, "--all"]) == 0
    assert "tokens does not fit the KV cache" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        [LLAMA_70B, "--gpus", "4xH100-80GB-PCIe"],
        ["Qwen/Qwen3-32B", "--gpus", "any", "--api-price", "3,0.3,15", "--rate", "2", "--tpot", "60ms"],
        ["deepseek-ai/DeepSeek-V3", "--gpus", "2x8xH200", "--engine", "shardline"],
        ["openai/gpt-oss-120b", "--gpus", "2xH100"],
        [LLAMA_70B, "--gpus", "1xL4"],
    ],
)
def test_a_plan_is_a_page(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 100
    assert not any("cp2" in line and " no" in line for line in lines), "refused layouts are for --all"


def test_more_than_the_fewest_gpus_has_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json(capsys, LLAMA_70B, "--gpus", "4xH100-80GB-PCIe")
    assert plan["layouts"][plan["recommended"]]["pp"] == 2
    answer = plan["path"][0]["answer"]
    assert re.fullmatch(r"2 GPUs: int4 fits 1, but costs \$2\.\d\d a million output tokens, not \$1\.94", answer)


def test_the_demo_model_has_no_command_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    commands = plan_json(capsys, "demo", "--gpus", "1xL4", "--max-model-len", "512", "--input-len", "64")["commands"]
    assert commands["shardline"].startswith("shardline serve demo")
    assert commands["vllm"] is None


@pytest.mark.slow
def test_weights_that_become_dense_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json(capsys, "deepseek-ai/DeepSeek-V3", "--gpus", "2x8xH200", "--engine", "shardline")
    assert plan["missing"].startswith("GPU kernels of Shardline that keep these fp8 weights packed")
    packed = plan_json(capsys, "deepseek-ai/DeepSeek-V3", "--gpus", "8xH200", "--engine", "vllm")
    quantized = plan_json(capsys, "Qwen/Qwen3-32B", "--gpus", "1xH100", "--quantization", "fp8")
    assert packed["missing"] is quantized["missing"] is None


def test_the_memory_the_longest_context_and_the_bandwidth_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    words = [LLAMA_70B, "--gpus", "4xH100", "-tp", "4", "--quantization", "none", "--kv-cache-dtype", "auto"]
    assert main(["plan", *words]) == 0
    text = capsys.readouterr().out
    sizes = {
        name: float(re.search(rf"^  {name} +([0-9.]+) GiB", text, re.MULTILINE)[1])  # type: ignore[index]
        for name in ("weights", "step and libraries", "KV cache", "unused")
    }
    assert sum(sizes.values()) == pytest.approx(79.2, abs=0.2), "the parts are the whole"
    assert sizes["weights"] == pytest.approx(32.9, abs=0.1)
    assert "tokens of 81.9 kB" in text, "a token's keys and values on one of four GPUs"
    assert "longest context: 131,072 tokens (all positions of the model)" in text
    assert "fits:  59 requests of 8,192 tokens at once" in text
    assert re.search(r"axis +kB a token +exchanges +MB a step +nvlink 450 +pcie 64 +network 50\n", text)
    assert main(["plan", LLAMA_70B, "--gpus", "1xL4", "--quantization", "none"]) == 0
    assert re.search(r"^  KV cache +-\d+\.\d GiB   so much is missing$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.slow
def test_every_axis_has_its_traffic_on_every_link(capsys: pytest.CaptureFixture[str]) -> None:
    dense = plan_json(capsys, LLAMA_70B, "--gpus", "4xH100", "-tp", "4", "--running", "32")
    axes = {one["axis"]: one for one in dense["bandwidth"]}
    assert set(axes) == {"tp4", "pp4", "dp4"}, "those that an engine starts"
    assert axes["pp4"]["bytes_per_token"] == 2 * 8192, "one hidden state"
    assert axes["dp4"]["step_bytes"] == 0
    assert axes["tp4"]["step_bytes"] == 32 * axes["tp4"]["bytes_per_token"]
    for one in axes.values():
        seconds = one["link_seconds"]
        assert seconds["nvlink 450"] <= seconds["pcie 64"] <= seconds["network 50"]
    best = dense["layouts"][dense["recommended"]]
    share = axes["tp4"]["link_seconds"]["nvlink 450"] / (best["tpot_ms"]["p50"] / 1e3)
    assert 0 < share < best["link_share"] + 0.01, "of a step with prompts, links are a smaller part"
    experts = plan_json(capsys, "Qwen/Qwen3-235B-A22B-FP8", "--gpus", "8xH200", "--engine", "vllm")
    assert {one["axis"][:2] for one in experts["bandwidth"]} == {"tp", "pp", "ep", "dp"}
    nothing = plan_json(capsys, LLAMA_70B, "--gpus", "1xL4")
    assert (nothing["memory"], nothing["bandwidth"]) == (None, [])


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json(capsys, LLAMA_70B, "--gpus", "4xH100", "-tp", "4", "--max-model-len", "32768", "--quantization",
                     "none", "--kv-cache-dtype", "auto")  # fmt: skip
    best = plan["layouts"][plan["recommended"]]
    keys = {"tp", "pp", "ep", "dp", "cp", "weights", "kv", "verdict", "weight_bytes", "kv_tokens", "max_context",
            "concurrency", "ttft_ms", "tpot_ms", "output_tok_s", "cost_per_million", "bound_by", "why_not"}  # fmt: skip
    assert keys <= set(best)
    assert best["tp"] == 4
    assert best["weight_bytes"] / 2**30 == pytest.approx(32.9, abs=0.1)
    assert best["verdict"] == "comfortable"
    assert best["ttft_ms"]["p10"] < best["ttft_ms"]["p50"] < best["ttft_ms"]["p90"]
    assert {one["question"] for one in plan["path"]}
    assert plan["commands"]["shardline"].startswith("shardline serve ")
    assert all(one["tp"] == 4 for one in plan["layouts"])


def test_fixed_sizes_that_divide_no_half_of_the_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json(capsys, LLAMA_70B, "--gpus", "8xH100", "-tp", "5", "--engine", "shardline")
    assert {one["tp"] for one in plan["layouts"] if one["cp"] == 1} == {5}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["shardline", "vllm"])
def test_every_replica_holds_a_whole_request(engine: str) -> None:
    """Two replicas with room for 0.6 of a request each cannot run one of them."""
    for gpus in ("8xA100-80GB", "A100-80GB-PCIe+2xL40S"):
        cluster = parse_cluster(gpus, known_gpus())
        for one in search(find_model(LLAMA_70B), cluster, Demand(32_768), "cost", engine).options:
            assert one.fit.weight_bytes > 0, "refused layouts have their weights too"
            if one.fits:
                assert one.fit.concurrency / one.layout.data >= 1
                assert one.fit.max_context >= 32_768
                assert (one.fit.verdict == "tight") == (one.fit.requests < 4)
    assert whole_requests(4.5, 3) == 3


def test_a_part_of_an_uneven_node_has_the_memory_of_its_own_gpus() -> None:
    result = found(LLAMA_70B, "A100-80GB-PCIe+2xL40S", Demand(8192), weights="int4", kv="auto")
    alone = next(one for one in result.options if one.layout.num_gpus == 1)
    assert alone.fits, "39.6 GB of weights fit the A100, and not an L40S"
    assert {one.layout.weights for one in found(LLAMA_70B, "A100-80GB-PCIe+2xL40S", Demand(8192)).options} == {
        "bf16",
        "int8",
        "int4",
    }, "the A100 has no fp8"


@pytest.mark.slow
@pytest.mark.parametrize("gpus", ["4xH100", "8xL4", "2x4xRTX-PRO-6000", "A100-80GB-PCIe+2xL40S"])
def test_the_fewest_gpus_are_those_of_the_table(gpus: str) -> None:
    result = found(LLAMA_70B, gpus, Demand(32_768))
    for label in {one.layout.weights for one in result.options}:
        fits = [one.layout.num_gpus for one in result.options if one.fits and one.layout.weights == label]
        one = fewest_gpus(result, label)
        assert one is not None
        assert one.fits
        assert one.layout.num_gpus == min(fits) if fits else one.layout.num_gpus > result.cluster.num_gpus
    assert fewest_gpus(found("meta-llama/Llama-3.1-405B", "L4", Demand(131_072)), "bf16", 8) is None


def test_models_that_only_vllm_runs(capsys: pytest.CaptureFixture[str]) -> None:
    name = "nvidia/Llama-3_3-Nemotron-Super-49B-v1"
    plan = plan_json(capsys, name, "--gpus", "8xH200", "-tp", "8")
    assert plan["vllm_only"]
    assert plan["computed_by_torch"] == {}
    assert plan["commands"]["shardline"] is None
    assert plan["commands"]["vllm"].startswith(f"vllm serve {name}")


def test_ops_that_torch_computes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json(capsys, "openai/gpt-oss-120b", "--gpus", "8xH200", "-tp", "8")
    assert plan["vllm_only"] is None
    assert plan["computed_by_torch"] == {
        "attention": "Triton's has no attention sinks",
        "experts": "Triton's has no biases of experts",
    }
    assert plan["commands"]["shardline"].startswith("shardline serve openai/gpt-oss-120b")
    assert main(["plan", "openai/gpt-oss-120b", "--gpus", "8xH200", "-tp", "8"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "torch computes attention, more slowly than planned: Triton's has no attention sinks" in told


def test_the_fewest_and_the_cheapest_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    words = [LLAMA_70B, "--gpus", "H100-80GB-SXM5", "--quantization", "none", "--kv-cache-dtype", "auto"]
    assert plan_json(capsys, *words)["gpus"] == "3xH100-80GB-SXM5"
    assert plan_json(capsys, *words, "-pp", "1", "--engine", "vllm")["gpus"] == "4xH100-80GB-SXM5", "64 heads"
    assert plan_json(capsys, LLAMA_70B, "--gpus", "H100", "-tp", "16")["gpus"] == "2x8xH100-80GB-SXM5"
    plan = plan_json(capsys, "Qwen/Qwen3-0.6B", "--gpus", "any")
    assert plan["recommended"] == 0
    plan = plan_json(capsys, "Qwen/Qwen3-0.6B", "--gpus", "any", "--link", "xgmi")
    assert plan["gpus"].startswith("1xMI3"), "only GPUs that can have the link"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([LLAMA_70B], "--gpus is missing"),
        (["--gpus", "L4"], "name a model"),
        ([LLAMA_70B, "--gpus", "4xH1000"], "unknown GPU 'H1000'; the nearest are"),
        ([LLAMA_70B, "--gpus", "4xL4", "--link", "nvlink"], "L4 cannot have it"),
        ([LLAMA_70B, "--gpus", "L4", "--rate", "0"], "--rate must be above zero"),
        ([LLAMA_70B, "--gpus", "L4", "--rate", "inf"], "--rate must be above zero, and finite"),
        ([LLAMA_70B, "--gpus", "L4", "--api-price", "nan,1,1"], "--api-price 'nan,1,1': write dollars"),
        ([LLAMA_70B, "--gpus", "8xH100", "-tp", "3", "--engine", "vllm"], "divides the 64 attention heads, not 3"),
        (["meta-llama/Llama-3.1-8B", "--gpus", "64xH100", "-tp", "48"], "tensor_parallel_size 48 does not work"),
        (["meta-llama/Llama-3.1-8B", "--gpus", "H100", "-tp", "48"], "tensor_parallel_size 48 does not work"),
        ([LLAMA_70B, "--gpus", "4xH100", "-tp", "4", "-pp", "2"], "need 8 GPUs, and 4xH100-80GB-SXM5 has 4"),
        ([LLAMA_70B, "--gpus", "L4", "--tpot", "fast"], "write for example 60ms"),
        ([LLAMA_70B, "--gpus", "L4", "--input-len", "9000", "--max-model-len", "4096"], "more than --max-model-len"),
        ([LLAMA_70B, "--gpus", "L4", "--quantization", "gptq", "--engine", "vllm"], "weights 'gptq': known are"),
        ([LLAMA_70B, "--gpus", "4xH100,2xL40S"], "2x8xH100-80GB-SXM5 or A100+2xL40S"),
        (["./nothing", "--gpus", "L4"], "model './nothing': there is no such folder"),
        (["meta-llama/Llama-3.1-70B-Instrct", "--gpus", "L4"], "did you mean meta-llama/Llama-3.1-70B-Instruct"),
        (["nobody/nothing", "--gpus", "L4"], "config.json of the hub repository nobody/nothing"),
        ([LLAMA_70B, "--gpus", "L4", "--max-model-len", "200000"], "more than the 131072 positions"),
        (["--validate", "/nothing.csv"], "/nothing.csv cannot be read"),
    ],
)
def test_mistakes_are_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_folder_that_is_no_causal_model(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert main(["plan", str(tmp_path), "--gpus", "L4"]) == 2
    assert "no spec for model_type 'bert'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_managed_api(capsys: pytest.CaptureFixture[str]) -> None:
    words = [LLAMA_70B, "--gpus", "4xH100", "--api-price", "0.9,0.1,0.9"]
    plan = plan_json(capsys, *words)
    best = plan["layouts"][plan["recommended"]]
    assert plan["costs"]["per_month"] == pytest.approx(720 * best["price_per_hour"][1])
    assert plan["costs"]["output_per_million"] == pytest.approx(8 * plan["costs"]["input_per_million"])
    assert plan["costs"]["full_output_per_million"] == pytest.approx(best["cost_per_million"])
    assert plan["api_break_even_tokens_a_day"] == pytest.approx(best["price_per_hour"][1] * 24 / 0.9 * 1e6)
    assert main(["plan", *words]) == 0
    assert "an API? 0.90 dollars for a million mean tokens" in capsys.readouterr().out
    cached = plan_json(capsys, *words, "--prefix-len", "512")
    mean = (0.9 * (512 + 128) + 0.1 * 512) / 1152
    ratio = cached["api_break_even_tokens_a_day"] / plan["api_break_even_tokens_a_day"]
    assert ratio == pytest.approx(0.9 / mean), "an API has them cached"
    assert main(["plan", *words[:-1], "0.9,0.9"]) == 2
    assert "IN,CACHED,OUT" in capsys.readouterr().err


def test_traffic_between_nodes_and_operations_cost_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["meta-llama/Llama-3.1-405B", "--gpus", "2x8xH100", "-tp", "8", "-pp", "2", "--rate", "0.5"]
    words += ["--quantization", "none", "--api-price", "3,3,3"]
    plain = plan_json(capsys, *words)
    costs = plan_json(capsys, *words, "--traffic-price", "0.02", "--operations-price", "7200")["costs"]
    tokens = 0.5 * (1024 + 128) * 3600 * 720
    assert costs["traffic_gb_per_month"] == pytest.approx(tokens * 16384 * 2 / 1e9, rel=0.01), "one hand-off a token"
    assert costs["traffic_per_month"] == pytest.approx(0.02 * costs["traffic_gb_per_month"])
    extra = costs["per_month"] - plain["costs"]["per_month"]
    assert extra == pytest.approx(7200 + costs["traffic_per_month"])
    outputs = tokens * 128 / 1152
    more = costs["output_per_million"] - plain["costs"]["output_per_million"]
    assert more == pytest.approx(1e6 * extra / outputs, rel=0.01)
    busy = plan_json(capsys, *words, "--operations-price", "7200")
    per_hour = plain["costs"]["per_hour"]
    ratio = busy["api_break_even_tokens_a_day"] / plain["api_break_even_tokens_a_day"]
    assert ratio == pytest.approx((per_hour + 10) / per_hour)
    never = plan_json(capsys, *words, "--traffic-price", "1000")
    assert never["api_break_even_tokens_a_day"] is None
    assert main(["plan", *words, "--traffic-price", "-1"]) == 2
    assert "--traffic-price -1 must be at least 0" in capsys.readouterr().err


def test_what_turns_a_no_into_a_yes(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json(capsys, LLAMA_70B, "--gpus", "2xA100-80GB", "--max-model-len", "32768", "-tp", "2")
    refused = next(one for one in plan["layouts"] if one["weights"] == "bf16" and one["kv"] == "auto")
    assert refused["verdict"] == "no"
    ways = {f"{weights} weights, {kv} KV cache" for weights in ("int4", "int8") for kv in ("auto", "int8")}
    ways |= {"bf16 weights, int8 KV cache", f"--max-model-len {refused['max_context']}"}
    assert set(refused["turns_yes"]) == ways


def test_tensor_parallel_efficiency_falls_with_ranks_and_slow_links() -> None:
    result = found(LLAMA_70B, "8xH100", Demand(8192, running=16), tensor=8, weights="bf16", kv="auto")
    fast, slow = (tensor_efficiency(result, result.options[0], rate) for rate in (450e9, 32e9))
    assert 1 > fast[2] > fast[4] > fast[8] > 0.4
    assert all(slow[size] < fast[size] for size in fast)


def test_a_further_axis_of_the_table_is_planned_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exchanges take time, and its name is in layouts, comparisons and traffic."""
    monkeypatch.setitem(COORDINATES, "context", "sp")
    for module in (report, search_module):
        monkeypatch.setattr(module, "STARTED_AXES", (*STARTED_AXES, "context"))
    monkeypatch.setitem(GROUPS, "stages", ("pipeline",))  # type: ignore[misc]
    monkeypatch.setitem(TRAFFIC, "stages", lambda *_: NOTHING)  # type: ignore[misc]
    result = found(LLAMA_70B, "4xH100", Demand(8192, running=8), pipeline=4, weights="bf16", kv="auto")
    assert parse_layout("tp2-sp2", result) == Layout("shardline", 2, context=2)
    assert str(Layout("shardline", 2, context=2)) == "bf16 tp2 sp2"
    speeds = []
    for messages in (0, 100):
        traffic = Traffic(1e5 * messages, messages)
        monkeypatch.setitem(TRAFFIC, "stages", lambda spec, layers, ranks, *_, one=traffic: one)  # type: ignore[misc]
        fresh = found(LLAMA_70B, "4xH100", Demand(8192, running=8), pipeline=4, weights="bf16", kv="auto")
        assert fresh.best is not None
        assert fresh.best.speed is not None
        speeds.append(fresh.best.speed)
    assert speeds[0].link_share < speeds[1].link_share
    assert fresh.best is not None
    assert {one.axis for one in axis_traffic(fresh, fresh.best)} == {"tp4", "pp4", "dp4", "sp4"}


def test_context_parallelism_is_no_layout_until_an_engine_starts_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [LLAMA_70B, "--gpus", "8xH100", "--max-model-len", "131072", "--quantization", "none"]
    assert main(["plan", *words, "--all"]) == 0
    assert not re.search(r"\bcp\d|context.parallel", capsys.readouterr().out)
    monkeypatch.setattr(search_module, "STARTED_AXES", (*STARTED_AXES, "context"))
    spread = [one for one in found(LLAMA_70B, "4xH100", Demand(8192)).options if one.layout.context > 1]
    assert (2, 2) in {(one.layout.tensor, one.layout.context) for one in spread}
    assert not any(one.fits for one in spread), "the engine refuses them"


def test_the_planner_is_a_library() -> None:
    model = planner.find_model("Qwen/Qwen3-32B")
    plan = planner.plan_on("H100", model, planner.demand_for(model, {"max_model_len": 4096}, input_len=512))
    assert plan.best is not None
    assert plan.demand.max_model_len == 4096
    assert "$ shardline serve Qwen/Qwen3-32B" in planner.format_plan(plan)
    found = planner.simulate_plan(plan, planner.Workload(num_prompts=8))
    assert found.num_requests == 8
    with pytest.raises(ValueError, match="--replicas must be at least 1, got 0"):
        planner.Workload(replicas=0)
    assert all(hasattr(planner, name) for name in planner.__all__)


def test_gpus_without_bfloat16_are_planned_for_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "Qwen/Qwen3-0.6B", "--gpus", "1xT4"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "vLLM instead: T4 does not compute in bfloat16; it takes float16." in printed
    assert "$ vllm serve" in printed
    for flags, says in (
        (["--engine", "shardline"], "leave it out to plan vLLM"),
        (["--dtype", "bfloat16"], "T4 does not compute in it; use --dtype float16"),
    ):
        assert main([*words, *flags]) == 2
        assert says in capsys.readouterr().err
    assert main([*words, "--dtype", "float16"]) == 0
    assert "--dtype float16" in capsys.readouterr().out


def test_models_with_states(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A stage may store nothing for tokens, states have memory, and no prefix is cached."""
    model = str(make_checkpoint("qwen3_5_text", tmp_path / "model"))
    words = [model, "--gpus", "4xH100-80GB", "--engine", "shardline", "--dtype", "bfloat16", "--max-model-len", "128"]
    words += ["--input-len", "32", "--output-len", "32", "-tp", "1", "-pp", "3"]
    plan = plan_json(capsys, *words)
    assert plan["commands"]["shardline"].startswith("shardline serve")
    fewer, more = (
        plan_json(capsys, "Qwen/Qwen3.5-27B", *words[1:-4], "-tp", "2", "-pp", "1", "--max-num-seqs", str(seqs))
        for seqs in (16, 128)
    )
    assert fewer["memory"]["kv_bytes"] - more["memory"]["kv_bytes"] > 112 * 70e6  # half of 48 states of 3.1 MB each
    told = plan_json(capsys, *words, "--simulate", "--num-prompts", "20", "--prefix-len", "16", "--num-prefixes", "1")
    assert told["simulation"]["prefix_hit_rate"] == 0
