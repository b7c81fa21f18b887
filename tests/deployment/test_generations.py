"""What generations of GPUs compute: one table for serve, plan and doctor."""

from __future__ import annotations

import pytest

from shardline.deployment.generations import check_format, generation_of, generations
from shardline.deployment.machine import Device
from shardline.planner.hardware import known_gpus
from tests.deployment.machines import gpu


def test_the_planners_gpus_compute_what_their_generation_does() -> None:
    for known in known_gpus().values():
        generation = generation_of(gpu(1, 1, capability=known.capability))
        assert generation is not None
        assert generation.name == known.architecture, known.name
        if known.vendor == "NVIDIA":  # gfx942 has an fp8 of its own
            for rate, number_format in (("fp8", "e4m3"), ("int8", "bytes")):
                assert (rate in known.tflops) == (number_format in generation.native), known.name


def test_no_format_is_in_both_lists() -> None:
    for known in generations().values():
        assert not set(known.native) & set(known.unpacked)
        assert "float32" in known.native


@pytest.mark.parametrize(
    ("capability", "known"),
    [
        ("sm_87", "sm_86"),
        ("sm_103", "sm_100"),
        ("sm_121", "sm_120"),
        ("sm_999", "sm_120"),
        ("gfx940", "gfx90a"),
        ("gfx1201", "gfx1100"),
        ("sm_70", None),
        ("gfx900", None),
        ("gfx1030", None),
        ("", None),
        ("sm_abc", None),
    ],
)
def test_an_unknown_architecture_counts_as_the_one_before(capability: str, known: str | None) -> None:
    assert generation_of(gpu(1, 1, capability=capability)) == (None if known is None else generations()[known])


def test_refusals_say_what_would_work() -> None:
    old = gpu(1, 1, name="Tesla T4", capability="sm_75")
    with pytest.raises(
        ValueError, match=r"\(sm_80 or later\), and Tesla T4 is sm_75; use x, or serve it with --kernels "
    ):
        check_format("dtype bfloat16", "bfloat16", [old], "own", "x")
    check_format("dtype bfloat16", "bfloat16", [old], "torch", "x")
    check_format("dtype float32", "float32", [old], "own", "x")
    apple = Device("mps", "Apple GPU", 1, 1)
    with pytest.raises(ValueError, match=r"fp8 needs a device that computes in it, and Apple GPU does not; use int8$"):
        check_format("kv_cache_dtype fp8", "e4m3", [apple], "torch", "int8")
    amd = gpu(1, 1, name="MI300X", capability="gfx942")
    with pytest.raises(ValueError, match=r"\(gfx950 or later\), and MI300X is gfx942; use int8, or serve it with"):
        check_format("quantization fp8", "e4m3", [amd], "own", "int8")
