"""The way from a fault to an answer that is right: a process that proves, verdicts that are kept, and torch instead."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
import torch
import triton

from shardline.cli.main import main
from shardline.config.engine import EngineConfig
from shardline.deployment import kernel_proofs
from shardline.deployment.deployment import Deployment, KernelFallback, RankPlacement
from shardline.deployment.kernel_cases import KernelCase, kernel_cases
from shardline.deployment.kernel_proofs import Verdict, card_identity, prove_cases, verdicts_here
from shardline.deployment.machine import Device
from shardline.doctor import kernels
from shardline.kernels.contract import LoadedProducts
from shardline.kernels.cuda.gpu_kernels import CudaKernels
from shardline.kernels.cuda.proof import child
from shardline.kernels.cuda.proof.trials import OPS
from shardline.runtime.machines.base import Share
from shardline.runtime.machines.cuda.fallbacks import choose_kernels
from shardline.runtime.machines.cuda.machine import CudaBackend
from shardline.runtime.machines.host.machine import HostBackend
from tests.deployment.machines import machine
from tests.kernels.cuda.helpers import CPU, InterpretedBackend
from tests.kernels.cuda.mutants import CASES, plant
from tests.kernels.cuda.test_model import load, logits, step_of
from tests.models.checkpoints import make_checkpoint

CARD = Device("cuda", "NVIDIA Strange", 1, 1, capability="sm_90")


class Fork:
    """A child of this process, with its kernels and the faults in them."""

    def __init__(self, theirs: socket.socket) -> None:
        self._pid = os.fork()
        self._code: int | None = None
        if not self._pid:
            try:
                child.serve(theirs)
            finally:
                os._exit(0)

    def kill(self) -> None:
        if self._code is None:
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code


class ProvingBackend(InterpretedBackend):
    """A GPU whose kernels are proved: those of the kinds `tried` in truth."""

    def __init__(self, *tried: str, share: Share | None = None) -> None:
        super().__init__()
        self._tried = tried
        self._other_ranks = share

    def choose_kernels(self, deployment: Deployment, here: RankPlacement, share: Share) -> tuple[KernelFallback, ...]:
        cases = kernel_cases(deployment)
        tried = [case for case in cases if case.kernel in self._tried]
        verdicts = prove_cases(tried, "cpu", "sm_90", start=Fork, patience=4.0, processes=1)
        verdicts += [Verdict(case) for case in cases if case not in tried]
        return self.use_kernels(deployment, verdicts, self._other_ranks or share)

    def finish_loading(self, products: LoadedProducts) -> None:
        if self._mixes:  # else it would try the library of a GPU
            CudaBackend.finish_loading(self, products)


FAULTS = {
    "rms_norm": ("norm._norm_kernel", "    inside = column < width", "    __import__('os')._exit(3)"),
    "activation": ("activation._activation_kernel", "    inside = column < width", "    while True:\n        pass"),
    "add": ("add._add_kernel", "x + y", "x.no_such_thing + y"),
    "write_kv": ("kv_cache._write_kv_kernel", "+ slot % block_size", "+ (slot + 1) % block_size"),
}
REASONS = {
    "activation": "the process that proves kernels did not end within 4 s (activation silu, gated True)",
    "add": "InterpreterError: AttributeError(\"'tensor' object has no attribute 'no_such_thing'\") (width 64)",
    "rms_norm": "the process that proves kernels ended with exit code 3 (width 64, eps 0.001)",
    "write_kv": "an infinite number or NaN is at another place (kv_heads 2, dim 16, block 16)",
}


def test_faults_are_named_and_replaced_and_the_answer_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("llama", tmp_path, num_hidden_layers=2)
    expected = logits(load(tmp_path, {}, HostBackend()), 1)
    for fault in FAULTS.values():
        plant(monkeypatch, *fault)
    backend = ProvingBackend(*FAULTS)
    worker = load(tmp_path, {}, backend)
    found = {fallback.kernel: fallback.why for fallback in worker._backend._fallbacks}  # type: ignore[attr-defined]
    assert found == REASONS
    assert f"-torch{torch.__version__}-activation+add+rms_norm+write_kv-" in backend.kernel_path
    for ours, theirs in zip(logits(worker, 4), expected, strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()
        assert torch.equal(ours.argmax(1), theirs.argmax(1))


def test_the_doctor_prints_the_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`doctor --kernels` tries all cases of the model, and `serve` finds its verdicts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = str(make_checkpoint("gpt2", tmp_path / "model", n_layer=1))
    plant(monkeypatch, *FAULTS["write_kv"])
    only = ("add", "write_kv", "penalize", "activation")
    config = EngineConfig.from_options(model=model, dtype="float32", max_model_len=64)
    monkeypatch.setattr(kernels, "kernel_cases", lambda setup: [c for c in kernel_cases(setup) if c.kernel in only])
    found = kernels.prove_kernels(config, machine((8 << 30, 7 << 30)), start=Fork, name="cpu")
    monkeypatch.setattr(kernels, "prove_kernels", lambda config: found)
    assert main(["doctor", model, "--kernels"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "NVIDIA H100 (sm_90)"
    assert {line.split()[0] for line in lines if "float32" in line} == set(only)
    assert sum("torch instead" in line for line in lines) == 1
    (card,) = found
    device = machine((8 << 30, 7 << 30)).hosts[0].devices[1]
    assert verdicts_here([one.case for one in card.verdicts], device, "cpu", prove=prove_nothing) == card.verdicts


def test_without_gpus_there_is_nothing_to_prove(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--kernels", "--device", "cpu"]) == 0
    assert "no kernel of Triton runs here" in capsys.readouterr().out


def test_triton_alone_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--device", "cpu", "--kernels", "triton"]) == 2
    assert "kernels triton are for NVIDIA's GPUs" in capsys.readouterr().err


CALLED: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"n_layer": 1},
    "deepseek_v3": {},
    "qwen2_moe": {},
    "gemma": {},
}


@pytest.mark.parametrize("family", CALLED)
def test_cases_speak_for_every_kernel_that_a_model_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """What they leave out would be torch's on a GPU, unsaid."""
    make_checkpoint(family, tmp_path, **(CALLED[family] or {"num_hidden_layers": 2}))
    backend, called = InterpretedBackend(), set[str]()
    for name in {op for ops in OPS.values() for op in ops}:
        op = getattr(backend.kernels, name)

        def counted(*arguments: object, op: Callable[..., object] = op, name: str = name) -> object:
            called.add(name)
            return op(*arguments)

        monkeypatch.setattr(backend.kernels, name, counted)
    worker = load(tmp_path, {"quantization": "int8_fast"} if family == "gemma" else {}, backend)
    with torch.inference_mode():
        step = step_of([5, 17], 0)
        worker.stage.forward(step, worker.stage.embed(step))
    named = {op for case in kernel_cases(worker._deployment) for op in OPS[case.kernel]}
    assert called
    assert called <= named


def cases_of(*names: str) -> list[KernelCase]:
    return [CASES[name] for name in names]


def test_the_process_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with Triton's interpreter in it."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    verdicts = prove_cases(cases_of("row_digests", "mask_tokens"), "cpu", "sm_90", processes=2)
    assert [verdict.problem for verdict in verdicts] == ["", ""]
    assert all(verdict.seconds > 0 for verdict in verdicts)


def test_a_process_that_does_not_begin_decides_nothing_for_long() -> None:
    class Ended:
        def __init__(self, theirs: socket.socket) -> None: ...

        def kill(self) -> None: ...

        def wait(self) -> int:
            return 1

    verdicts = prove_cases(cases_of("add", "softcap"), "cpu", start=Ended, processes=1)
    assert [verdict.lasts for verdict in verdicts] == [False, False]
    assert "the process that proves kernels ended with exit code 1" in verdicts[0].problem


def test_an_exception_costs_no_other_case_and_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, *FAULTS["add"])
    started: list[Fork] = []

    def start(theirs: socket.socket) -> Fork:
        started.append(Fork(theirs))
        return started[-1]

    verdicts = prove_cases(cases_of("add", "softcap", "add"), "cpu", start=start, processes=1)
    assert ["InterpreterError" in verdict.problem for verdict in verdicts] == [True, False, True]
    assert all(verdict.lasts for verdict in verdicts)
    assert len(started) == 1


def test_a_disk_that_is_full_decides_nothing_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(child, "problem_of", full)
    (verdict,) = prove_cases(cases_of("add"), "cpu", start=Fork)
    assert verdict.problem == "OSError: [Errno 28] No space left on device"
    assert not verdict.lasts


def prove_nothing(cases: Sequence[KernelCase], name: str, capability: str) -> NoReturn:
    raise AssertionError("all verdicts are kept")


def prove_as(problem: str, lasts: bool = True):
    return lambda cases, name, capability: [Verdict(case, problem, 0.1, lasts) for case in cases]


def test_verdicts_are_kept_for_the_card_and_the_software(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    add, softcap = cases_of("add", "softcap")
    first = verdicts_here([add], CARD, "cuda:0", prove=prove_as("is wrong"))
    assert verdicts_here([add], CARD, "cuda:0", prove=prove_nothing) == first
    both = verdicts_here([softcap, add], CARD, "cuda:0", prove=prove_as(""))
    assert [verdict.problem for verdict in both] == ["", "is wrong"]
    again = verdicts_here([add], CARD, "cuda:0", again=True, prove=prove_as("", lasts=False))
    assert not again[0].problem
    with pytest.raises(AssertionError):
        verdicts_here([add], CARD, "cuda:0", prove=prove_nothing)
    other = msgspec.structs.replace(CARD, name="NVIDIA Other")
    with pytest.raises(AssertionError):
        verdicts_here([softcap], other, "cuda:0", prove=prove_nothing)
    assert set(card_identity(CARD)) == {"card", "capability", "driver", "torch", "triton", "shardline", "kernels"}


@pytest.mark.parametrize("content", [b"garbage", b"", b'{"identity": {}, "verdicts": 3}', b"\xff\xfe"])
def test_a_file_of_garbage_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    verdicts_here(cases_of("add"), CARD, "cuda:0", prove=prove_as(""))
    (file,) = (tmp_path / "shardline" / "kernels").iterdir()
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert verdicts_here(cases_of("add"), CARD, "cuda:0", prove=prove_as("is wrong"))[0].problem == "is wrong"
    (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert "cannot be read" in record.message
    assert verdicts_here(cases_of("add"), CARD, "cuda:0", prove=prove_nothing)[0].problem == "is wrong"


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Path, data: bytes) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    for home in ("/dev/null", str(tmp_path)):
        caplog.clear()
        monkeypatch.setenv("XDG_CACHE_HOME", home)
        with caplog.at_level(logging.WARNING):
            assert not verdicts_here(cases_of("add"), CARD, "cuda:0", prove=prove_as(""))[0].problem
        assert sum("so each start proves them again" in record.message for record in caplog.records) == 1
        monkeypatch.setattr(Path, "write_bytes", full)


@pytest.mark.parametrize("is_full", [False, True])
def test_triton_compiles_where_its_folder_cannot_be_written(
    is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(tmp_path) if is_full else "/dev/null/triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def full(dir: Path) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    if is_full:
        monkeypatch.setattr(kernel_proofs, "NamedTemporaryFile", full)
    with caplog.at_level(logging.WARNING):
        verdicts_here(cases_of("add"), CARD, "cuda:0", prove=prove_as(""))
    assert sum("Triton cannot keep compiled kernels" in record.message for record in caplog.records) == 1
    assert triton.knobs.cache.dir == os.environ["TRITON_CACHE_DIR"] != folder
    assert Path(triton.knobs.cache.dir).is_dir()


def test_ranks_do_without_what_failed_on_any(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, num_hidden_layers=2)
    setup = load(tmp_path, {})._deployment
    verdicts = [Verdict(case, "is wrong" if case.kernel == "attention" else "") for case in kernel_cases(setup)]
    other = msgspec.msgpack.encode([KernelFallback("sample", "hangs")])
    own = CudaKernels(CPU)
    found = choose_kernels(own, setup, verdicts, lambda mine: (mine, other))
    assert [fallback.kernel for fallback in found] == ["attention", "sample"]
    assert found[1].why == "rank 1: hangs"
    assert own.replaced >= OPS["attention"] | OPS["sample"] | OPS["mla"]
    assert not own.replaced & (OPS["linear"] | OPS["rope"] | OPS["logprobs"])
    strict = msgspec.structs.replace(setup, kernels="triton")
    with pytest.raises(
        ValueError, match=r"not all kernels are proved here: attention: is wrong .*; sample: rank 1: hangs;"
    ):
        choose_kernels(CudaKernels(CPU), strict, verdicts, lambda own: (own, other))
