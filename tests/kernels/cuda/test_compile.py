"""What the kernels become on GPUs, as far as a compiler can tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch

from shardline.deployment.generations import generations
from shardline.kernels.cuda.triton import gemm, launch

TENSOR_CORE_CASES = ("linear", "attention", "experts", "w4a16")
PRODUCTS = ("_linear_kernel", "_linear_w4a16_kernel", "_grouped_kernel", "attention_kernel")


SAMPLED = {"sm_75": ["linear_m1"], "sm_89": ["linear_m2048", "attention_mla_decode"], "gfx942": ["linear_m1"]}
"""Cases by generation; `make gpu-compile` compiles all of them."""
DECODE = "_m1_"
SPILL = ("sm_75", "gfx1100")
"""Generations with too few registers for two products in fp32, or in instructions of 32 threads: slower there."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "words" in metafunc.fixturenames:
        of_each = [[name] for name in generations() if name[:2] in ("sm", "gf")]
        of_some = [f"{name}:{case}" for name, cases in SAMPLED.items() for case in cases]
        metafunc.parametrize(
            "words", of_each if metafunc.config.getoption("--full-matrix") else [of_some], ids=" ".join
        )


def test_kernels_suit_other_generations(words: list[str]) -> None:
    """They compile and fit, multiply with the instructions for it, and spill nothing in decode steps."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.cuda.compile_kernels", "--on", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found.keys() == {word.partition(":")[0] for word in words}
    for name, kernels in found.items():
        known = generations()[name]
        assert kernels
        for kernel in kernels:
            is_product = kernel["name"] in PRODUCTS
            if not (name == "sm_75" and kernel["case"].startswith("attention_mla")):  # too wide in fp32: torch's there
                assert kernel["shared_bytes"] <= 1024 * known.shared_kib, (name, kernel)
            if is_product and "bfloat16" in known.native:
                assert kernel["matrix"] > 0, (name, kernel)
            if is_product and name not in SPILL and DECODE in f"{kernel['case']}_":
                assert kernel["spills"] == 0, (name, kernel)


def products_of(kernels: list[dict[str, Any]]) -> list[dict[str, int]]:
    """The instructions of the launches that multiply matrices, at least one."""
    found = [kernel["opcodes"] for kernel in kernels if kernel["name"] in PRODUCTS]
    assert found, kernels
    return found


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[dict[str, Any]]]:
    """By case of compile_kernels, what became of its launches."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    def part(number: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.kernels.cuda.compile_kernels", "--part", str(number), "2"]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250)

    found: dict[str, list[dict[str, Any]]] = {}
    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(part, range(2)):
            assert done.returncode == 0, done.stderr[-4000:]
            found |= json.loads(done.stdout)
    return found


def test_every_kernel_compiles_and_fits_a_multiprocessor(compiled):
    assert len(compiled) > 20
    for case, kernels in compiled.items():
        assert kernels, case
        for kernel in kernels:
            assert kernel["shared_bytes"] <= 227 * 1024, (case, kernel)


def test_bf16_products_are_wgmma_whatever_the_tile(compiled):
    """mma of another generation may add in another order: then bits would follow the batch."""
    cases = [case for case in compiled if case.startswith(TENSOR_CORE_CASES)]
    assert len(cases) > 10
    for case in cases:
        for opcodes in products_of(compiled[case]):
            assert opcodes.get("HGMMA", 0) > 0, case
            assert "HMMA" not in opcodes, case


def test_fp8_products_are_wgmma(compiled):
    for case in ("fp8_m1", "fp8_m2048"):
        assert compiled[case][1]["opcodes"].get("QGMMA", 0) > 0, case


def test_products_of_bytes_are_wgmma(compiled):
    for case in ("int8_m1", "int8_m2048", "int4_m1", "int4_m2048", "int4_experts"):
        for opcodes in products_of(compiled[case]):
            assert opcodes.get("IGMMA", 0) > 0, case


def test_weights_and_keys_are_copied_asynchronously_in_16_bytes(compiled):
    for case in (
        "linear_m1",
        "linear_m2048",
        "w4a16_m1",
        "w4a16_m2048",
        "experts_m1",
        "attention_decode_spread",
        "attention_prefill",
    ):
        for opcodes in products_of(compiled[case]):
            assert opcodes.get("LDGSTS.E.BYPASS.128", 0) > 0, case


def test_products_fit_the_shared_memory_of_each_generation() -> None:
    """Bytes as Triton's compiler counts them; `make exact` compiles."""
    for name, known in generations().items():
        if not known.shared_kib:
            continue
        launch.use_generation(name)
        for rows, dtype in product((1, 100, 1000), (torch.float32, torch.bfloat16, torch.int8)):
            block_k, tile = gemm._BLOCK_K[dtype.itemsize], gemm.tile_for(rows, 4096, dtype)
            stages = gemm.stages_of(tile, block_k, dtype.itemsize)
            each = (tile.rows + tile.columns) * block_k * dtype.itemsize
            assert (stages - (not known.holds_all_stages)) * each <= 1024 * known.shared_kib, (name, tile)
            assert name not in ("sm_90", "sm_100") or stages == tile.num_stages
    launch.use_generation("")
