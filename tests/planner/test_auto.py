"""Parallel sizes for the devices of a host."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from shardline.cli.main import main
from shardline.config.engine import EngineConfig
from shardline.deployment import cpu_rates
from shardline.deployment.here import resolve_here
from shardline.deployment.machine import Device, Host, Machine
from shardline.models.adapters import adaptable_parameters
from shardline.planner import auto
from shardline.planner.auto import chosen_config, measure_host, path_here, plan_here
from shardline.planner.catalog import find_model
from shardline.planner.cluster import parse_cluster
from shardline.planner.hardware import known_gpus
from shardline.planner.layout import Demand
from shardline.planner.page import format_plan
from shardline.planner.report import plan_memory
from shardline.planner.search import Plan
from shardline.planner.simulation.simulate import replica_setup, simulate_plan
from shardline.planner.simulation.workload import Workload
from tests.models.checkpoints import make_checkpoint


def host(name: str, count: int, gib: float) -> Machine:
    gpus = [Device("cuda", name, int(gib * 2**30), int(gib * 2**30), "sm_90", identifier=str(i)) for i in range(count)]
    return Machine((Host("here", 2**36, 16, (Device("cpu", "CPU", 2**36, 2**36, "avx2", cores=16), *gpus)),))


def choose(model: str, machine: Machine, *fixed: str, **options: object) -> Plan:
    config = EngineConfig.from_options(model=model, **options)
    return plan_here(config, find_model(model), machine, {name: options[name] for name in fixed})


def test_gpus_that_a_large_model_needs() -> None:
    machine = host("NVIDIA H100 80GB HBM3", 4, 79.1)
    choice = choose("meta-llama/Llama-3.1-70B-Instruct", machine, max_model_len=8192)
    parallel, path = chosen_config(choice).parallel, path_here(choice)
    assert parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1
    assert path[0] == "devices: 4xH100-80GB-SXM5, nvlink"
    assert "layouts are refused" in path[-2]
    assert choice.best is not None
    assert choice.best.layout.tensor == parallel.tensor_parallel_size
    given = choose("meta-llama/Llama-3.1-70B-Instruct", machine, "pipeline_parallel_size", max_model_len=8192,
                   pipeline_parallel_size=4)  # fmt: skip
    assert {one.layout.pipeline for one in given.options} == {4}


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB-SXM4"),
        ("NVIDIA H200", "H200-141GB-SXM"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000-Blackwell-Server"),
        ("NVIDIA H100 PCIe", "H100-80GB-PCIe"),
    ],
)
def test_names_of_drivers(name: str, known: str) -> None:
    assert auto._known_cluster([Device("cuda", name, 0, 0)]).name == f"1x{known}"


@pytest.mark.slow
def test_a_cpu_is_measured_and_used_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    machine = host("", 0, 0)
    small = parse_cluster("1xL4", known_gpus()).gpus[0]
    monkeypatch.setattr(auto, "measure_host", lambda machine, threads: small)
    choice = choose("Qwen/Qwen3-0.6B", machine, max_model_len=2048)
    assert choice.options[0].layout.num_gpus == 1, "ranks of one memory only add exchanges"
    assert sum(option.fits for option in choice.options) > 10
    none = "^no layout works on this host: "
    with pytest.raises(
        ValueError, match=none + r"the given sizes make 20 ranks, and a plan for it has at most 16 \(16 c"
    ):
        choose("Qwen/Qwen3-0.6B", machine, "data_parallel_size", data_parallel_size=20)
    with pytest.raises(ValueError, match=none + "with the fewest ranks: max_model_len 99999 is"):
        choose("Qwen/Qwen3-0.6B", machine, max_model_len=99999)
    assert (
        main(["plan", "Qwen/Qwen3-0.6B", "--gpus", "here", "--device", "cpu", "--max-model-len", "2048", "--json"]) == 0
    )
    plan = json.loads(capsys.readouterr().out)
    assert plan["commands"]["shardline"].startswith("shardline serve Qwen/Qwen3-0.6B --device cpu")
    assert plan["layouts"][0]["output_tok_s"]["p50"] > 0


def test_serve_starts_with_the_chosen_sizes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[EngineConfig] = []

    def run_server(engine: EngineConfig, server: object) -> int:
        started.append(engine)
        return 0

    monkeypatch.setattr("shardline.server.launch.run_server", run_server)
    monkeypatch.setattr("shardline.process_title.set_process_title", lambda name: None)
    monkeypatch.setattr(auto, "measure_host", lambda machine, threads: parse_cluster("1xL4", known_gpus()).gpus[0])
    words = ["serve", "demo", "--parallel", "auto", "--device", "cpu", "--data-parallel-size", "2"]
    assert main(words) == 0
    assert (started[0].parallel.tensor_parallel_size, started[0].parallel.data_parallel_size) == (1, 2)
    assert "--parallel auto: chosen for" in capsys.readouterr().err
    assert main(["serve", "demo", "--parallel", "auto", "--device", "cpu", "--data-parallel-size", "99"]) == 2
    assert "error: --parallel auto: no layout works on this host: the given sizes make 99" in capsys.readouterr().err


def test_nothing_is_claimed_of_torchs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    # The best would be all GPUs of such a host.
    monkeypatch.setattr(auto, "measure_host", lambda machine, threads: parse_cluster("1xL4", known_gpus()).gpus[0])
    choice = choose("Qwen/Qwen3-0.6B", host("", 0, 0), max_model_len=2048, kernels="torch")
    assert path_here(choice) == [
        "bf16 tp1: the fewest ranks that have room; how fast torch's operations are is not known"
    ]
    gpus = host("NVIDIA H100 80GB HBM3", 4, 79.1)
    large = choose("meta-llama/Llama-3.1-70B-Instruct", gpus, max_model_len=8192, kernels="torch", numerics="fast")
    assert chosen_config(large).parallel.tensor_parallel_size == 2
    small = choose("Qwen/Qwen3-0.6B", gpus, max_model_len=2048, kernels="torch")
    assert small.best is not None
    assert small.best.layout.num_gpus == 1
    with pytest.raises(ValueError, match=r"^no layout works on this host: with the fewest ranks: "):
        choose("meta-llama/Llama-3.1-405B-Instruct", gpus, max_model_len=8192, kernels="torch")


def test_measuring_finds_plausible_rates() -> None:
    machine = host("", 0, 0)
    found = measure_host(Machine((msgspec.structs.replace(machine.hosts[0], cores=2),)))
    assert 1 < found.bandwidth_gbs < 5000
    # CPUs without products in bf16 expand it, so either may be faster.
    assert all(1e-4 < found.tflops[name] < 100 for name in ("bf16", "fp32"))


@pytest.mark.slow
def test_a_plan_for_this_host_counts_its_load_and_simulates_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(auto, "measure_host", lambda machine, threads: parse_cluster("1xL4", known_gpus()).gpus[0])
    words = ["plan", "demo", "--gpus", "here", "--device", "cpu", "--input-len", "128"]
    assert main([*words, "--running", "3"]) == 0
    text = capsys.readouterr().out
    assert "chosen for 3 requests of 128 + 128 tokens" in text
    assert "  $ shardline serve demo --device cpu\n" in text
    assert main([*words, "--dtype", "float32"]) == 0
    assert "recommended: fp32 tp1\n" in capsys.readouterr().out
    assert main([*words, "--running", "3", "-cp", "2"]) == 0
    assert "  $ shardline serve demo --device cpu --context-parallel-size 2\n" in capsys.readouterr().out
    assert main([*words, "--compare", "tp1", "dp2", "--all", "--html", str(tmp_path / "plan.html")]) == 0
    assert re.search(r"^TPOT: bf16 \w+ is better ", capsys.readouterr().out, re.MULTILINE)
    assert "recommended: " in (tmp_path / "plan.html").read_text(encoding="utf-8")
    lines = ("recommended: ", "fits:", "speed:", "memory of a rank", "links: ", "dense or experts?", "\nlayout ")
    places = [text.index(line) for line in lines]
    assert places == sorted(places)
    assert main([*words, "--simulate"]) == 0
    text = capsys.readouterr().out
    assert "chosen for 16 requests of 128 + 128 tokens" in text
    assert "simulated: 1,000 requests" in text
    words += ["--output-len", "32", "--simulate", "--num-prompts", "40", "--rate", "2", "--ttft", "10s", "--json"]
    assert main(words) == 0
    slow = json.loads(capsys.readouterr().out)["simulation"]
    assert (slow["requests"], slow["too_long"]) == (40, 0)
    assert slow["seconds"] > 10, "two requests a second"
    assert slow["goodput_per_s"] == pytest.approx(slow["requests_per_s"])
    assert main([*words, "--replicas", "3", "--data-parallel-size", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["simulation"]["replicas"] == 3


def test_a_plan_for_this_host_counts_a_draft_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(auto, "measure_host", lambda machine, threads: parse_cluster("1xL4", known_gpus()).gpus[0])
    words = ["plan", "demo", "--gpus", "here", "--device", "cpu", "--kv-cache-memory", "64MiB", "-tp", "1", "-dp", "1"]
    words += ["--pipeline-parallel-size", "1", "-cp", "1", "--max-num-seqs", "16"]
    assert main(words) == 0
    [plain] = re.findall(r"KV cache .* ([\d,]+) tokens of", capsys.readouterr().out)
    drafts = {"model": "demo", "num_speculative_tokens": 3}
    assert main([*words, "--speculative-config", json.dumps(drafts)]) == 0
    text = capsys.readouterr().out
    [half] = re.findall(r"KV cache .* ([\d,]+) tokens of", text)
    assert int(half.replace(",", "")) == pytest.approx(int(plain.replace(",", "")) / 2, rel=0.03)
    assert re.search(r"weights +22.0 MiB   11.0 MiB of them the draft model's, and 8.2 kB of each token", text)


def test_a_plan_for_this_host_counts_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "measure_host", lambda machine, threads: parse_cluster("1xL4", known_gpus()).gpus[0])
    sizes = {f"{axis}_parallel_size": 1 for axis in ("tensor", "pipeline", "data")}

    def memory(**lora: int) -> tuple[dict[str, int], str]:
        choice = choose("demo", host("", 0, 0), *sizes, **sizes, enable_lora=bool(lora), **lora)
        assert choice.best is not None
        return plan_memory(choice, choice.best), format_plan(choice)

    (plain, page), (few, page_with) = memory(), memory(max_loras=2, max_lora_rank=64)
    assert plain["lora_bytes"] == 0
    assert "LoRA" not in page
    found = dict(adaptable_parameters(find_model("demo").spec))
    products = 64 * 2 * sum(sum(shape) for shape in found.values())
    factors = 4 * sum(outputs for outputs, _ in found.values())
    assert few["lora_bytes"] == 2 * (products + factors)
    assert re.search(r"\n  LoRA adapters +[\d.]+ MiB   2 of rank 64\n", page_with)
    assert few["unused_bytes"] == plain["unused_bytes"] - few["lora_bytes"]
    in_cpu_memory, _ = memory(max_loras=2, max_cpu_loras=4, max_lora_rank=64)
    assert in_cpu_memory["lora_bytes"] == 2 * few["lora_bytes"]
    many, _ = memory(max_loras=(2**36 - 2**31) // (few["lora_bytes"] // 2), max_lora_rank=64)
    assert 0 < many["kv_bytes"] < plain["kv_bytes"], "the KV cache gets what is left"


def test_loads_that_no_layout_can_run_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(auto, "measure_host", lambda machine, threads: parse_cluster("1xL4", known_gpus()).gpus[0])
    words = ["plan", "demo", "--gpus", "here", "--device", "cpu"]
    for more, says in (
        (["--input-len", "4000"], "--input-len and --output-len make 4128 tokens, more than the 2048 positions"),
        (["--input-len", "100", "--max-model-len", "64"], "more than --max-model-len 64"),
        (["--input-len", "0"], "--input-len must be above zero, got 0"),
        (["--running", "0"], "--running must be above zero, got 0"),
    ):
        assert main([*words, *more]) == 2
        assert says in capsys.readouterr().err
    assert main([*words, "--max-model-len", "64"]) == 0
    assert "16 requests of 32 + 32 tokens" in capsys.readouterr().out, "the usual load is as short as the model"


def test_gpus_of_this_host_are_simulated() -> None:
    """Their KV cache is what is left of the memory."""
    choice = choose(
        "meta-llama/Llama-3.1-8B-Instruct", host("NVIDIA H100 80GB HBM3", 2, 79.1), "data_parallel_size",
        max_model_len=8192, data_parallel_size=2,
    )  # fmt: skip
    deployment = choice.options[0].fit.deployment
    assert deployment is not None
    setup = replica_setup(choice, choice.options[0])
    assert setup.overlaps_steps
    block_bytes = max(deployment.cache.block_bytes)
    assert 45 < setup.num_blocks * block_bytes / 2**30 < 65
    demand = Demand(8192, 1024, 64)
    found = simulate_plan(choice, Workload(num_prompts=64), demand)
    assert (found.num_requests, found.num_replicas) == (64, 2)
    assert found.output_tokens_per_second > 1000


def test_a_plan_for_this_host_counts_the_experts_that_tokens_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(auto, "measure_host", lambda machine, threads: parse_cluster("1xL4", known_gpus()).gpus[0])
    model = str(make_checkpoint("qwen3_moe", tmp_path / "model", num_hidden_layers=4))
    words = ["plan", model, "--gpus", "here", "--device", "cpu", "-tp", "1", "-dp", "1", "-pp", "1", "-cp", "1"]
    words += ["--cpu-offload-gb", "1", "--offload-to", str(tmp_path), "--storage-gbs", "0.0001"]
    [rank] = resolve_here(EngineConfig.from_options(model=model, cpu_offload_gb=1.0, offload_to=str(tmp_path))).weights
    routing = resolve_here(EngineConfig.from_options(model=model)).spec.layers[-1].feed_forward.routing
    assert routing is not None
    few, all_layers = routing.experts_per_token / routing.num_experts, rank.read_bytes + rank.expert_layer_bytes
    for running, num_bytes in (("1", few * rank.read_bytes), ("64", all_layers)):
        assert main([*words, "--running", running, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["layouts"][0]
        assert found["bound_by"] == "storage"
        assert found["tpot_ms"]["p50"] == pytest.approx(1e3 * num_bytes / (0.82 * 0.0001e9), rel=0.02)
    assert main(words) == 0
    assert "read when tokens choose them: " in capsys.readouterr().out


def test_a_plan_for_this_host_counts_weights_from_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(auto, "measure_host", lambda machine, threads: parse_cluster("1xL4", known_gpus()).gpus[0])
    monkeypatch.setattr(cpu_rates, "_STORED_BYTES", 16 << 20)
    words = ["plan", "demo", "--gpus", "here", "--device", "cpu", "-tp", "1", "-dp", "1", "-pp", "1", "-cp", "1"]
    read = [*words, "--cpu-offload-gb", "1", "--offload-to", str(tmp_path)]
    assert main([*words, "--json"]) == 0
    kept = json.loads(capsys.readouterr().out)["layouts"][0]
    assert main([*read, "--storage-gbs", "0.01", "--json"]) == 0
    streamed = json.loads(capsys.readouterr().out)["layouts"][0]
    config = EngineConfig.from_options(model="demo", cpu_offload_gb=1.0, offload_to=str(tmp_path))
    [rank] = resolve_here(config).weights
    assert streamed["weight_bytes"] == rank.num_bytes < kept["weight_bytes"]
    assert streamed["bound_by"] == "storage"
    # bf16 is stored shorter, and the rest of the rate is lost while the cores compute.
    seconds = 0.75 * rank.read_bytes / (0.82 * 0.01e9)
    assert streamed["tpot_ms"]["p50"] == pytest.approx(1e3 * seconds, rel=1e-3)
    assert main(read) == 0
    text = capsys.readouterr().out
    assert re.search(r"read in every step: [\d.]+ GiB more of weights: at [\d.]+ GB/s, a step takes", text)
    assert not list(tmp_path.iterdir())
    for wrong, says in (
        ([*words, "--storage-gbs", "1"], "needs --offload-to"),
        ([*read[:-1], "/proc/nowhere"], "cannot be written to /proc/nowhere: "),
        ([*read[:-1], "/proc/nowhere"], "or give `plan` the rate as --storage-gbs"),
    ):
        assert main(wrong) == 2
        assert says in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_for_this_host_counts_copies_of_experts(tmp_path: Path) -> None:
    model = str(make_checkpoint("mixtral", tmp_path))
    sizes = {"tensor": 3, "pipeline": 1, "data": 1, "context": 1}
    options: dict[str, object] = {f"{axis}_parallel_size": size for axis, size in sizes.items()}
    options |= {"enable_expert_parallel": True, "device": "cpu"}
    copies = {"enable_eplb": True, "eplb_config": {"num_redundant_experts": 3}}
    kept, more = (
        choose(model, host("", 0, 0), *options, **options, **other).options[0].fit.weight_bytes
        for other in ({}, copies)
    )
    layers, linears, elements, element_bytes = 4, 3, 56 * 64, 4
    assert more - kept == layers * linears * elements * element_bytes, "each rank has one more"
