"""Which kernels run: the C++ ones for tensors in host memory, the Triton ones for tensors on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shardline import _cpu


class Kernels(Protocol):
    """What a back end offers; `shardline._cpu` is the model. Ops say what each computes; here outputs are arguments."""

    def activation_empty(self, dtype: torch.dtype, /, *sizes: int) -> Tensor:
        """An uninitialised tensor that dies within its step."""

    def linear(
        self, x: Tensor, panels: Tensor, bias: Tensor | None, out: Tensor, gate: str | None = ..., /
    ) -> None: ...
    def quantize_rows(self, x: Tensor, values: Tensor, scales: Tensor, sums: Tensor, /) -> None: ...
    def linear_int8(
        self,
        values: Tensor,
        scales: Tensor,
        sums: Tensor,
        depth: int,
        panels: Tensor,
        column_scales: Tensor,
        bias: Tensor | None,
        out: Tensor,
        gate: str | None = ...,
        /,
    ) -> None: ...
    def linear_int4(
        self,
        values: Tensor,
        scales: Tensor,
        sums: Tensor,
        depth: int,
        panels: Tensor,
        column_scales: Tensor,
        bias: Tensor | None,
        out: Tensor,
        gate: str | None = ...,
        /,
    ) -> None: ...
    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor | tuple[Tensor, Tensor, Tensor],
        eps: float,
        weight_offset: float,
        residual: Tensor | None,
        summed: Tensor | None,
        /,
    ) -> None: ...
    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor | tuple[Tensor, Tensor, Tensor],
        eps: float,
        residual: Tensor | None,
        summed: Tensor | None,
        /,
    ) -> None: ...
    def add(self, x: Tensor, y: Tensor, out: Tensor, /) -> None: ...
    def apply_rope(self, x: Tensor, positions: Tensor, table: Tensor, interleaved: bool, /) -> None: ...
    def activation(self, x: Tensor, out: Tensor, name: str, gated: bool, /) -> None: ...
    def softcap(self, logits: Tensor, cap: float, /) -> None: ...
    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
        key_scales: Tensor | None,
        value_scales: Tensor | None,
        /,
    ) -> None: ...
    def rope_and_write_kv(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        positions: Tensor,
        slots: Tensor,
        table: Tensor,
        interleaved: bool,
        key_scales: Tensor | None,
        value_scales: Tensor | None,
        /,
    ) -> None: ...
    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        out: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        key_scales: Tensor | None,
        value_scales: Tensor | None,
        /,
    ) -> None: ...
    def linear_heads(self, x: Tensor, panels: Tensor, out: Tensor, /) -> None: ...
    def write_latent(self, latent: Tensor, rope_key: Tensor, cache: Tensor, slots: Tensor, /) -> None: ...
    def mla_attention(
        self,
        query_latent: Tensor,
        query_rope: Tensor,
        cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        out: Tensor,
        scale: float,
        /,
    ) -> None: ...
    def expert_up(
        self,
        x: Tensor,
        ids: Tensor,
        first_expert: int,
        compact: bool,
        panels: Tensor,
        scales: Tensor | None,
        activation: str,
        gated: bool,
        out: Tensor,
        /,
    ) -> None: ...
    def expert_down(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        first_expert: int,
        panels: Tensor,
        scales: Tensor | None,
        shared: Tensor | None,
        shared_scale: Tensor | None,
        out: Tensor,
        /,
    ) -> None: ...
    def pack_dispatch(self, x: Tensor, ids: Tensor, expert_bounds: Tensor, out: Tensor, /) -> None: ...
    def expert_slots(
        self,
        x: Tensor,
        ids: Tensor,
        first_expert: int,
        panels: Tensor,
        scales: Tensor | None,
        out: Tensor,
        /,
    ) -> None: ...
    def combine_slots(
        self,
        rows: Tensor,
        ids: Tensor,
        slot_weights: Tensor,
        expert_bounds: Tensor,
        shared: Tensor | None,
        shared_scale: Tensor | None,
        out: Tensor,
        /,
    ) -> None: ...
    def greedy_argmax(self, logits: Tensor, ids: Tensor, values: Tensor, /) -> None: ...
    def logprobs(
        self,
        logits: Tensor,
        chosen: Tensor,
        top_n: int,
        chosen_logprobs: Tensor,
        chosen_ranks: Tensor,
        top_ids: Tensor,
        top_logprobs: Tensor,
        /,
    ) -> None: ...
    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        choices: Tensor,
        positions: Tensor,
        purpose: int,
        tokens: Tensor,
        /,
    ) -> None: ...


def _host() -> Kernels:
    return _cpu


def _gpu() -> Kernels:
    from shardline.runtime.ops import triton  # machines without a GPU need not have Triton

    return triton


_BACK_ENDS: dict[str, Callable[[], Kernels]] = {"cpu": _host, "cuda": _gpu}


def kernels(x: Tensor) -> Kernels:
    """Those for tensors that lie where x does."""
    return _BACK_ENDS.get(x.device.type, _host)()


def isa() -> str:
    """The kernels in use: "portable", "avx2", "avx512" or "avx512_bf16". Part of a response's fingerprint."""
    return _cpu.isa()


def available_isas() -> list[str]:
    """What this CPU can run, best last."""
    return _cpu.available_isas()


def set_isa(name: str) -> None:
    """Use other kernels in the whole process: ranks agree on the lowest that all of them have."""
    _cpu.set_isa(name)


def num_threads() -> int:
    return _cpu.num_threads()


def set_num_threads(num_threads: int, pin: Sequence[int] = ()) -> None:
    """Threads for ops called from the calling thread, itself included; 1 until set.

    The pool belongs to the calling thread, so that ranks can be threads of one process. `pin` names one CPU per
    thread, the caller's first; without it threads run wherever the process may.
    """
    _cpu.set_num_threads(num_threads, list(pin))
