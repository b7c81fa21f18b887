"""Times of steps and of requests, and their calibration."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from scripts.published.rows import planned_work

from shardline.models.step_work import StepWork
from shardline.planner.calibration import Measured, calibrate
from shardline.planner.catalog import find_model
from shardline.planner.cluster import parse_cluster
from shardline.planner.hardware import known_gpus
from shardline.planner.layout import Layout
from shardline.planner.timing import Load, LoopSteps, StepLoad, loop_latency, loop_steps, shipped_timing


def test_a_step_is_one_product() -> None:
    """A mixed step reads the weights once: it is shorter than a prefill step and a decode step after each other."""
    constants = shipped_timing()["vllm"].constants
    decode = StepLoad(0.01, 0.002, 0.0001, 0.0, 0.0, 0.0, 0, 288, 8)
    prefill = decode._replace(cache=0.0, arithmetic=0.004, requests=0)
    mixed = decode._replace(arithmetic=0.0041)
    assert mixed.seconds(constants) < 0.75 * (decode.seconds(constants) + prefill.seconds(constants))
    assert decode.bound_by(constants) == "weights"
    assert decode._replace(arithmetic=1.0).bound_by(constants) == "arithmetic"
    assert decode._replace(exchange=1.0).bound_by(constants) == "links"
    assert decode._replace(expanded=1.0).seconds(constants) > decode._replace(arithmetic=1.0).seconds(constants)


def loop(**load: object) -> LoopSteps:
    work = layout_work_of_8b()
    values = {"running": 64, "input_len": 1024, "output_len": 256, "chunk": 8192, **load}
    return loop_steps(work, parse_cluster("1xH100", known_gpus()), Load(**values), 1)  # type: ignore[arg-type]


def layout_work_of_8b() -> StepWork:
    return planned_work(find_model("meta-llama/Llama-3.1-8B"), Layout("vllm"))


def test_when_prompts_are_computed() -> None:
    """Prompts before all else move time from TPOT to TTFT; those of other replicas and GPUs count in lockstep only."""
    constants = shipped_timing()["vllm"].constants
    mixed, first, in_phase, lockstep, apart = (
        loop_latency(loop(**load), constants)
        for load in (
            {},
            {"prefill_first": True},
            {"prefill_first": True, "in_phase": True},
            {"lockstep": 4},
            {"prompts_apart": True},
        )
    )
    assert apart.tpot < in_phase.tpot < mixed.tpot < first.tpot
    assert mixed.tpot < lockstep.tpot < 2 * mixed.tpot
    assert in_phase.ttft > mixed.ttft
    alone, start, equal, slow, busy = (
        loop_latency(loop(**load), constants).ttft
        for load in (
            {"rounds": 1e9, "equal_lengths": True, "running": 1},
            {"rounds": 1.0},
            {"rounds": 1e9, "equal_lengths": True},
            {"arrivals": 0.1},
            {"arrivals": 20.0},
        )
    )
    assert alone < equal < start == pytest.approx(in_phase.ttft, rel=0.3), "all prompts come at the start"
    assert alone < slow < busy < start, "prompts that rarely come hardly wait"
    assert in_phase.output_tokens_per_second == pytest.approx(mixed.output_tokens_per_second, rel=0.15)


def test_prompts_that_start_together_calibrate_the_arithmetic() -> None:
    timing, together = shipped_timing()["vllm"], loop(in_phase=True)
    slower = loop_latency(together, replace(timing.constants, compute=0.6 * timing.constants.compute))
    measured = Measured(64, 1024, 256, slower.ttft, slower.tpot)
    found = loop_latency(together, calibrate(timing, [(together, measured)]).constants)
    assert found.ttft == pytest.approx(slower.ttft, rel=0.03)
    assert found.tpot == pytest.approx(slower.tpot, rel=0.03)


def test_a_saturated_run_shares_the_steps_with_prompts() -> None:
    """As many whole prompts as a step has room for are computed in it; no request waits for its turn to be replaced."""
    constants = shipped_timing()["vllm"].constants
    full, closed = loop(saturated=True), loop()
    assert full.prompt_steps == 64 / 7, "64 of 8,192 tokens decode, and 7 prompts of 1,024 fit beside them"
    latency = loop_latency(full, constants)
    assert latency.output_tokens_per_second == pytest.approx(64 / latency.tpot)
    unlimited = replace(constants, saturated=1.0)
    ratio = (
        loop_latency(full, unlimited).output_tokens_per_second
        / loop_latency(closed, unlimited).output_tokens_per_second
    )
    assert ratio == pytest.approx(1.0, rel=0.1)


def test_each_product_computes_in_its_format() -> None:
    work = planned_work(find_model("openai/gpt-oss-120b"), Layout("vllm", weights="mxfp4"))
    assert set(work.token_flops) == {"bf16", "mxfp4"}, "attention is not quantized"
    gpu = parse_cluster("1xB200", known_gpus()).slowest
    assert gpu.flops_per_second("mxfp4") == gpu.flops_per_second("fp8"), "activations have 8 bits"
    assert gpu.flops_per_second("nvfp4") == 2 * gpu.flops_per_second("fp8")
    assert gpu.flops_per_second("int4") == gpu.flops_per_second("bf16")
    assert gpu.computes("mxfp4")
    assert not gpu.computes("int4")
    hopper = parse_cluster("1xH100", known_gpus()).slowest
    direct, expanded = work.product_seconds(64, 64, hopper.flops_per_second, hopper.computes)
    assert expanded > direct > 0, "experts in MXFP4 are expanded on a GPU without 4-bit floats"


def test_constants_are_physical() -> None:
    for engine, timing in shipped_timing().items():
        values = asdict(timing.constants)
        assert all(0.3 < values[name] <= 1.2 for name in ("memory", "cache", "compute", "link")), engine
        assert all(0.3 < values[name] <= 1 for name in ("attention", "expanded", "saturated")), engine
        assert all(0 <= values[name] < 1e-3 for name in ("message", "launch", "request")), engine
        for low, high in timing.spread.values():
            assert 0 < low < 1 < high
