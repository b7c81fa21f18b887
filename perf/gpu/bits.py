"""Whether a row's bits depend on the batch, at the sizes of large models: `proof/` asks this at small ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardline.kernels.cuda.gpu_kernels import CudaKernels
from shardline.kernels.cuda.triton import attention as attention_kernels
from shardline.kernels.cuda.triton.linear import launch_linear

from .inputs import Inputs, attempt
from .tiles import LINEAR_TILES

BUCKETS = (1, 2, 3, 7, 8, 16, 31, 33, 63, 64, 65, 100, 127, 128, 129, 200, 256, 257, 512, 1000, 1024, 2048, 4096)


class PagedCall:
    """A batch of sequences over shuffled blocks. The queries are [begin, end) of each sequence."""

    def __init__(
        self,
        on: Inputs,
        heads: int,
        kv_heads: int,
        dim: int,
        lengths: list[tuple[int, int]],
        stored: torch.dtype | None = None,
    ) -> None:
        """`stored` is the type of a cache with scales."""
        self.on, self.dim = on, dim
        counts = [-(-end // 16) for _, end in lengths]
        ids = 1 + torch.randperm(sum(counts), generator=on.rng).int()
        tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for s, count in enumerate(counts):
            tables[s, :count], ids = ids[:count], ids[count:]
        starts = torch.tensor([0, *torch.tensor([end - begin for begin, end in lengths]).cumsum(0)], dtype=torch.int32)
        lens = torch.tensor([end for _, end in lengths], dtype=torch.int32)
        self.query = on.randn(int(starts[-1]), heads, dim)
        shape = (sum(counts) + 1, kv_heads, 16, dim)
        self.caches = [on.randn(*shape) for _ in range(2)]
        self.scales: list[Tensor] = []
        if stored is not None:
            self.caches = [(20 * cache).clamp(-127, 127).to(stored) for cache in self.caches]
            self.scales = [(torch.rand(shape[:3], generator=on.rng) / 10).to(on.device) for _ in range(2)]
        self.index = [tensor.to(on.device) for tensor in (tables, starts, lens)]

    def run(self, window: int | None = None, cap: float | None = None, spread: bool | None = None) -> Tensor:
        out = self.on.poison(*self.query.shape)
        scale = self.dim**-0.5
        options = (scale, window, cap, *self.scales)
        self.on.kernels.paged_attention(self.query, *self.caches, *self.index, out, *options, spread_splits=spread)
        return out

    def part(self, sequence: int, begin: int, end: int) -> PagedCall:
        """Queries [begin, end) of one sequence alone. Its context ends at `end`."""
        tables, starts, lens = self.index
        first = int(starts[sequence]) - (int(lens[sequence]) - int(starts[sequence + 1] - starts[sequence]))
        other = object.__new__(PagedCall)
        other.on, other.dim, other.caches, other.scales = self.on, self.dim, self.caches, self.scales
        other.query = self.query[first + begin : first + end].contiguous()
        table = tables[sequence : sequence + 1, : -(-end // 16)].contiguous()
        other.index = [table, starts.new_tensor([0, end - begin]), lens.new_tensor([end])]
        return other


def linear_invariance(device: str) -> dict[str, Any]:
    """Whether rows have the same bits in every batch as in the largest, by weight shape; also for every tile."""
    result: dict[str, Any] = {}
    for columns, depth in [(6144, 4096), (4096, 14336), (28672, 4096), (1000, 1600)]:
        x = torch.randn(4096, depth, device=device).bfloat16()
        weight = torch.randn(columns, depth, device=device).bfloat16()
        whole = torch.empty(4096, columns, dtype=torch.bfloat16, device=device)
        kernels = CudaKernels(torch.device(device))
        kernels.linear(x, weight, None, whole)
        differing = []
        for rows in BUCKETS:
            first = min(5, 4096 - rows)
            out = torch.full((rows, columns), torch.nan, dtype=torch.bfloat16, device=device)
            kernels.linear(x[first : first + rows], weight, None, out)
            if not torch.equal(out, whole[first : first + rows]):
                differing.append(rows)
        tiles = {}
        for tile in LINEAR_TILES:
            out = torch.full_like(whole[:300], torch.nan)
            try:
                launch_linear(x[:300], weight, None, out, tile=tile)
                tiles[tile.name] = torch.equal(out, whole[:300])
            except Exception as error:  # a tile that does not fit is a result, not the end
                tiles[tile.name] = f"{type(error).__name__}: {str(error)[:80]}"
        library = torch.equal(torch.nn.functional.linear(x, weight)[:1], torch.nn.functional.linear(x[:1], weight))
        result[f"{columns}x{depth}"] = {
            "ok": not differing,
            "differing_rows": differing,
            "tiles_equal": tiles,
            "library_equal_m1_m4096": library,
        }
    return result


def attention_invariance(device: str) -> dict[str, Any]:
    """Whether chunks, decode, separate splits and neighbours keep the bits of whole prompts."""
    result: dict[str, Any] = {}
    shapes = [(32, 8, 128, None, None), (8, 1, 64, None, None), (16, 8, 256, 700, None)]
    shapes += [(32, 8, 128, None, stored) for stored in (torch.int8, torch.float8_e4m3fn)]
    for heads, kv_heads, dim, window, stored in shapes:
        lengths = [(0, 1300), (0, 40), (0, 513)]
        call = PagedCall(Inputs(device, torch.bfloat16), heads, kv_heads, dim, lengths, stored)
        whole = call.run(window)
        differing = []
        if not torch.equal(call.run(window, spread=True), whole):
            differing.append("spread")
        for begin, end in [(0, 5), (5, 511), (511, 513), (513, 1299), (0, 1300)]:
            for spread in (False, True):
                if not torch.equal(call.part(0, begin, end).run(window, spread=spread), whole[begin:end]):
                    differing.append(f"chunk {begin}:{end} spread={spread}")
        for position in (0, 63, 64, 511, 512, 700, 1023, 1024, 1299):
            for spread in (False, True):
                one = call.part(0, position, position + 1).run(window, spread=spread)
                if not torch.equal(one, whole[position : position + 1]):
                    differing.append(f"decode {position} spread={spread}")
        result[f"{heads}/{kv_heads}x{dim} window={window} {stored or ''}"] = {
            "ok": not differing,
            "differing": differing,
        }
    return result


def mla_invariance(device: str) -> dict[str, Any]:
    """Whether decode and chunks of latent attention have the bits of whole prompts, also with separate splits."""
    on = Inputs(device, torch.bfloat16)
    queries, query_rope, cache = on.randn(1300, 16, 512), on.randn(1300, 16, 64), on.randn(83, 16, 576)
    table = (1 + torch.randperm(82, generator=on.rng)).int()[None].to(device)

    def call(begin: int, end: int, spread: bool) -> Tensor:
        out = on.poison(end - begin, 16, 512)
        starts = torch.tensor([0, end - begin], dtype=torch.int32, device=device)
        lens, rows = torch.tensor([end], dtype=torch.int32, device=device), slice(begin, end)
        tables = table[:, : -(-end // 16)].contiguous()
        given = (queries[rows], query_rope[rows], cache, tables, starts, lens, out, 576**-0.5)
        attention_kernels.mla_attention(*given, spread_splits=spread)
        return out

    whole, differing = call(0, 1300, False), []
    for begin, end in [(0, 1300), (0, 5), (5, 511), (511, 513), (513, 1300), (0, 1), (512, 513), (1299, 1300)]:
        for spread in (False, True):
            if not torch.equal(call(begin, end, spread), whole[begin:end]):
                differing.append(f"{begin}:{end} spread={spread}")
    return {"16 heads": {"ok": not differing, "differing": differing}}


def run(device: str) -> dict[str, Any]:
    """Ask all of it."""
    questions = {"linear": linear_invariance, "attention": attention_invariance, "mla": mla_invariance}
    return {name: attempt(question, device) for name, question in questions.items()}
