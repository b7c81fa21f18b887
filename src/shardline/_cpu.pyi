from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

class _Buffer(Protocol):
    def __buffer__(self, flags: int, /) -> memoryview: ...

def isa() -> str: ...
def available_isas() -> list[str]: ...
def set_isa(name: str) -> None: ...
def num_threads() -> int: ...
def set_num_threads(num_threads: int, pin: Sequence[int] = ...) -> None: ...
def activation_empty(dtype: torch.dtype, *sizes: int) -> Tensor: ...
def activation_bytes() -> int: ...
def lay_out_tokens(
    starts: Sequence[int], lengths: Sequence[int], positions: Tensor, query_starts: Tensor, context_lens: Tensor
) -> None: ...
def lay_out_blocks(
    table: Tensor,
    rows: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    block_size: int,
    block_tables: Tensor,
    slots: Tensor,
) -> None: ...

class PageToucher:
    def __init__(self, buffer: _Buffer) -> None: ...
    def stop(self) -> None: ...
    def wait(self) -> None: ...

class Program:
    def begin(self) -> None: ...
    def end(self) -> None: ...
    def set_output(self, output: Tensor) -> None: ...
    def replay(self) -> Tensor | None: ...

def pack_weight(weight: Tensor, panels: Tensor, first: int = ..., half: int | None = ...) -> None: ...
def linear(x: Tensor, panels: Tensor, bias: Tensor | None, out: Tensor, gate: str | None = ...) -> None: ...
def quantize_rows(x: Tensor, values: Tensor, scales: Tensor, sums: Tensor) -> None: ...
def pack_int8(weight: Tensor, panels: Tensor, scales: Tensor, first: int = ..., half: int | None = ...) -> None: ...
def pack_int4(weight: Tensor, panels: Tensor, scales: Tensor, first: int = ..., half: int | None = ...) -> None: ...
def route_experts(
    logits: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    shared_scale: Tensor | None,
    counts: Tensor | None,
    sigmoid: bool,
    normalized: bool,
    scale: float,
    num_experts: int,
    num_groups: int,
    top_groups: int,
    top2_sum: bool,
) -> None: ...
def expert_up(
    x: Tensor,
    ids: Tensor,
    first_expert: int,
    compact: bool,
    panels: Tensor,
    scales: Tensor | None,
    activation: str,
    gated: bool,
    out: Tensor,
) -> None: ...
def expert_down(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    first_expert: int,
    panels: Tensor,
    scales: Tensor | None,
    shared: Tensor | None,
    shared_scale: Tensor | None,
    out: Tensor,
) -> None: ...
def expert_slots(
    x: Tensor, ids: Tensor, first_expert: int, panels: Tensor, scales: Tensor | None, out: Tensor
) -> None: ...
def combine_slots(
    rows: Tensor,
    ids: Tensor,
    weights: Tensor,
    expert_bounds: Tensor,
    shared: Tensor | None,
    shared_scale: Tensor | None,
    out: Tensor,
) -> None: ...
def count_exchanged(
    ids: Tensor, token_bounds: Sequence[int], expert_bounds: Tensor, row_counts: Tensor, slot_counts: Tensor
) -> None: ...
def pack_dispatch(x: Tensor, ids: Tensor, expert_bounds: Tensor, out: Tensor) -> None: ...
def linear_int8(
    values: Tensor,
    scales: Tensor,
    sums: Tensor,
    depth: int,
    panels: Tensor,
    column_scales: Tensor,
    bias: Tensor | None,
    out: Tensor,
    gate: str | None = ...,
) -> None: ...
def linear_int4(
    values: Tensor,
    scales: Tensor,
    sums: Tensor,
    depth: int,
    panels: Tensor,
    column_scales: Tensor,
    bias: Tensor | None,
    out: Tensor,
    gate: str | None = ...,
) -> None: ...
def rms_norm(
    x: Tensor,
    weight: Tensor,
    out: Tensor | tuple[Tensor, Tensor, Tensor],
    eps: float,
    weight_offset: float,
    residual: Tensor | None,
    summed: Tensor | None,
) -> None: ...
def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | tuple[Tensor, Tensor, Tensor],
    eps: float,
    residual: Tensor | None,
    summed: Tensor | None,
) -> None: ...
def add(x: Tensor, y: Tensor, out: Tensor) -> None: ...
def apply_rope(x: Tensor, positions: Tensor, table: Tensor, interleaved: bool) -> None: ...
def activation(x: Tensor, out: Tensor, name: str, gated: bool) -> None: ...
def softcap(logits: Tensor, cap: float) -> None: ...
def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> None: ...
def rope_and_write_kv(
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
) -> None: ...
def paged_attention(
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
) -> None: ...
def packed_rows(panels: Tensor, indices: Tensor, out: Tensor) -> None: ...
def linear_best(x: Tensor, panels: Tensor, bias: Tensor | None, num_columns: int, best: Tensor) -> None: ...
def linear_int8_best(
    values: Tensor,
    scales: Tensor,
    sums: Tensor,
    depth: int,
    panels: Tensor,
    column_scales: Tensor,
    bias: Tensor | None,
    num_columns: int,
    best: Tensor,
) -> None: ...
def choose_best(best: Tensor, pairs: Tensor) -> None: ...
def linear_heads(x: Tensor, panels: Tensor, out: Tensor) -> None: ...
def write_latent(latent: Tensor, rope_key: Tensor, cache: Tensor, slots: Tensor) -> None: ...
def mla_attention(
    query_latent: Tensor,
    query_rope: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    out: Tensor,
    scale: float,
) -> None: ...
def sample(
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
) -> None: ...
def penalize(
    logits: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    offsets: Tensor,
    ids: Tensor,
    output_counts: Tensor,
    in_prompt: Tensor,
    bias: Tensor,
) -> None: ...
def logprobs(
    logits: Tensor,
    chosen: Tensor,
    top_n: int,
    chosen_logprobs: Tensor,
    chosen_ranks: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
) -> None: ...
def greedy_argmax(logits: Tensor, ids: Tensor, values: Tensor) -> None: ...
def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]: ...
def uniform(seed: int, choice: int, position: int, purpose: int) -> float: ...

class CollectiveAborted(RuntimeError): ...

class SharedGroup:
    def __init__(
        self,
        buffer: _Buffer | Tensor,
        rank: int,
        size: int,
        spin_iterations: int | None = None,
        progress: npt.NDArray[np.int64] | None = None,
    ) -> None: ...
    @staticmethod
    def required_bytes(size: int, data_bytes: int) -> int: ...
    def barrier(self, timeout_s: float | None = None) -> None: ...
    def all_gather_columns(
        self, local: Tensor, widths: Sequence[int], out: Tensor, timeout_s: float | None = None
    ) -> None: ...
    def all_gather_rows(
        self, local: Tensor, counts: Sequence[int], out: Tensor, timeout_s: float | None = None
    ) -> None: ...
    def all_gather_quantized(
        self,
        local: Tensor,
        widths: Sequence[int],
        values: Tensor,
        scales: Tensor,
        sums: Tensor,
        timeout_s: float | None = None,
    ) -> None: ...
    def all_to_all_rows(self, local: Tensor, counts: Tensor, out: Tensor, timeout_s: float | None = None) -> None: ...
    def all_reduce_sum(self, x: Tensor, timeout_s: float | None = None) -> None: ...
    def abort(self) -> None: ...
    @property
    def aborted(self) -> bool: ...
    def arrived(self) -> list[int]: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

class Mailbox:
    def __init__(self, buffer: _Buffer | Tensor, spin_iterations: int | None = None) -> None: ...
    @staticmethod
    def required_bytes(capacity: int) -> int: ...
    def send(self, data: _Buffer | Tensor, timeout_s: float | None = None) -> None: ...
    def next_size(self, timeout_s: float | None = None) -> int: ...
    def recv_into(self, out: _Buffer | Tensor, timeout_s: float | None = None) -> int: ...
    def recv(self, timeout_s: float | None = None) -> bytes: ...
    def abort(self) -> None: ...
    def ready(self) -> bool: ...
    @property
    def capacity(self) -> int: ...
