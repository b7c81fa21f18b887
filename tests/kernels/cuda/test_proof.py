"""Proof before use: sound kernels pass their trials, and each planted fault is found."""

from __future__ import annotations

import pytest

from shardline.kernels.cuda.gpu_kernels import CudaKernels
from shardline.kernels.cuda.proof.trials import OPS, TRIALS, problem_of
from tests.kernels.cuda.helpers import CPU
from tests.kernels.cuda.mutants import CASES, MUTANTS, Mutant, plant


@pytest.mark.parametrize("kernel", CASES)
def test_sound_kernels_are_proved(kernel: str) -> None:
    assert problem_of(CASES[kernel], CudaKernels(CPU)) == ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.kernel}-{mutant.where}-{mutant.old}")
def test_a_planted_fault_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, mutant.where, mutant.old, mutant.new)
    assert problem_of(mutant.case or CASES[mutant.kernel], CudaKernels(CPU))


def test_each_kind_has_trials_and_two_mutants() -> None:
    assert TRIALS.keys() == OPS.keys() == CASES.keys()
    for kernel in CASES:
        assert sum(mutant.kernel == kernel for mutant in MUTANTS) >= 2, kernel
