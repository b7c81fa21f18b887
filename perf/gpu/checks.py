"""Checks every Triton kernel against an oracle of shardline.runtime.ops in fp64, and a row's bits against the batch."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardline.kernels.cuda.gpu_kernels import CudaKernels
from shardline.kernels.cuda.triton import attention as attention_kernels
from shardline.kernels.cuda.triton.linear import launch_linear
from shardline.runtime.ops import activation, norm
from shardline.runtime.ops.attention import kv_cache, linear_heads, rope
from shardline.runtime.ops.attention.latent import mla_attention_reference
from shardline.runtime.ops.attention.paged import paged_attention_reference
from shardline.runtime.ops.sampling import softcap

from .few_rows_checks import FewRowsChecks
from .inputs import Inputs, linear_reference, relative_error
from .sampling_checks import SamplingChecks
from .tiles import LINEAR_TILES
from .weight_checks import WeightChecks

# Relative error in the Frobenius norm: the limit of the arithmetic, with a margin for unlucky data.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
ALLOWED = {
    "sampling": 0.005,  # share of rows, since the last bit of exp differs between the devices
    "linear_fp8": 2e-3,  # the tensor cores add 128 products with 14 bits or so before fp32 takes over
}
BUCKETS = (1, 2, 3, 7, 8, 16, 31, 33, 63, 64, 65, 100, 127, 128, 129, 200, 256, 257, 512, 1000, 1024, 2048, 4096)


class Checks(Inputs):
    """Every method is a check that returns its relative error."""

    def rms_norm(self) -> float:
        rows, width = (3, 200) if self.small else (257, 4096)
        x, residual, weight = self.randn(rows, width), self.randn(rows, width), self.randn(width)
        out, summed = self.poison(rows, width), self.poison(rows, width)
        self.kernels.rms_norm(x, weight, out, 1e-5, 0.0, residual, summed)
        return relative_error(out, norm.rms_norm_reference((x + residual).cpu(), weight.cpu(), 1e-5))

    def layer_norm(self) -> float:
        rows, width = (3, 200) if self.small else (257, 1600)
        x, weight, bias, out = self.randn(rows, width), self.randn(width), self.randn(width), self.poison(rows, width)
        self.kernels.layer_norm(x, weight, bias, out, 1e-5, None, None)
        return relative_error(out, norm.layer_norm_reference(x.cpu(), weight.cpu(), bias.cpu(), 1e-5))

    def gated_activations(self) -> float:
        rows, width = (2, 300) if self.small else (65, 14336)
        worst = 0.0
        for name in ("silu", "gelu_tanh", "gelu", "relu"):
            x, out = self.randn(rows, 2 * width), self.poison(rows, width)
            self.kernels.activation(x, out, name, True)
            worst = max(worst, relative_error(out, activation.gated_activation_reference(x.cpu(), name)))
        return worst

    def gated_linear(self) -> float:
        """The bits are those of a product and then its activation. The interpreter is exempt: its products use BLAS."""
        worst = 0.0
        shapes = [(3, 40, 70)] if self.small else [(1, 14336, 4096), (100, 768, 2048), (600, 896, 896)]
        for rows, width, depth in shapes:
            x, weight, bias = self.randn(rows, depth), self.randn(2 * width, depth), self.randn(2 * width)
            both, expected, out = self.poison(rows, 2 * width), self.poison(rows, width), self.poison(rows, width)
            self.kernels.linear(x, weight, bias, both)
            self.kernels.activation(both, expected, "silu", True)
            self.kernels.linear(x, weight, bias, out, "silu")
            same = self.small or torch.equal(out, expected)
            assert same, f"{rows} rows: both products and their gate in one kernel differ"
            product = linear_reference(x.cpu(), weight.cpu(), bias.cpu())
            worst = max(worst, relative_error(out, activation.gated_activation_reference(product, "silu")))
        return worst

    def softcap(self) -> float:
        logits = 20 * self.randn(3, 300 if self.small else 128256).float()
        expected = softcap.softcap_reference(logits.cpu(), 30.0)
        self.kernels.softcap(logits, 30.0)
        return relative_error(logits, expected)

    def rope_and_write_kv(self) -> float:
        tokens, heads, kv_heads, dim = (3, 4, 2, 32) if self.small else (300, 32, 8, 128)
        qkv = self.randn(tokens, heads + 2 * kv_heads, dim)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        table = rope.rotary_table(1e4 ** (-torch.arange(0, dim, 2) / dim), 4096)
        positions = torch.randint(0, 4096, (tokens,), generator=self.rng)
        slots = torch.randperm(tokens + 16, generator=self.rng)[:tokens]
        blocks = -(-(tokens + 16) // 16)
        expected_q = rope.apply_rope_reference(q.cpu(), positions, table)
        expected_k = rope.apply_rope_reference(k.cpu(), positions, table)
        caches = [torch.zeros(blocks, kv_heads, 16, dim, dtype=self.dtype) for _ in range(2)]
        kv_cache.write_kv_reference(expected_k, v.cpu(), caches[0], caches[1], slots)
        key_cache, value_cache = (torch.zeros_like(cache, device=self.device) for cache in caches)
        on_device = (positions.to(self.device), slots.to(self.device), table.to(self.device))
        self.kernels.rope_and_write_kv(q, k, v, key_cache, value_cache, *on_device, False, None, None)
        assert torch.equal(value_cache.cpu(), caches[1]), "values are copied, not computed"
        return max(relative_error(q, expected_q), relative_error(key_cache, caches[0]))

    def paged_attention(self) -> float:
        worst = 0.0
        shapes = [(4, 2, 16)] if self.small else [(32, 8, 128), (8, 1, 64), (8, 4, 256), (6, 2, 80)]
        options: list[tuple[int | None, float | None]] = [(None, None), (100, 30.0)]
        for heads, kv_heads, dim in shapes:
            # The interpreter does not widen fp8 as the hardware does; the tests, which put that right, check it there.
            for stored in (None, torch.int8) if self.small else (None, torch.int8, torch.float8_e4m3fn):
                call = PagedCall(self, heads, kv_heads, dim, self._lengths(), stored)
                for window, cap in options:
                    expected = call.reference(window, cap)
                    for spread in (False, True):
                        worst = max(worst, relative_error(call.run(window, cap, spread), expected))
        return worst

    def write_kv_bytes(self) -> float:
        """Bytes and scales equal the oracle's."""
        tokens, heads, dim = (3, 2, 32) if self.small else (300, 8, 128)
        kv, slots = self.randn(2, tokens, heads, dim), torch.randperm(320, generator=self.rng)[:tokens]
        for stored in (torch.int8,) if self.small else (torch.int8, torch.float8_e4m3fn):
            caches = [torch.zeros(20, heads, 16, dim, dtype=stored) for _ in range(2)]
            scales = [torch.zeros(20, heads, 16) for _ in range(2)]
            on_device = [part.to(self.device, copy=True) for part in (*caches, slots, *scales)]
            self.kernels.write_kv(kv[0], kv[1], *on_device)
            named = {"key_scales": scales[0], "value_scales": scales[1]}
            kv_cache.write_kv_reference(kv[0].cpu(), kv[1].cpu(), *caches, slots, **named)
            pairs = zip((*caches, *scales), (*on_device[:2], *on_device[3:]), strict=True)
            same = all(torch.equal(theirs.float(), ours.cpu().float()) for theirs, ours in pairs)
            assert same, f"bytes and scales are exact, in {stored}"
        return 0.0

    def mla_attention(self) -> float:
        """With DeepSeek's dims. It includes the absorbed projections and the writing of latents."""
        tokens, heads, latent, rope_dim = (5, 2, 24, 8) if self.small else (600, 16, 512, 64)
        x, weights = self.randn(tokens, heads, 20), self.randn(heads, latent, 20)
        queries, query_rope = self.poison(tokens, heads, latent), self.randn(tokens, heads, rope_dim)
        self.kernels.linear_heads(x, weights, queries)
        worst = relative_error(queries, linear_heads.linear_heads_reference(x.cpu(), weights.cpu()))
        down, blocks = self.randn(tokens, latent + rope_dim), -(-tokens // 16)
        tables = (1 + torch.randperm(blocks, generator=self.rng)).int()[None]
        positions = torch.arange(tokens)
        slots = tables[0, positions // 16].long() * 16 + positions % 16
        cache = self.poison(blocks + 1, 16, latent + rope_dim)
        self.kernels.write_latent(down[:, :latent], down[:, latent:], cache, slots.to(self.device))
        index = (tables, torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32))
        on_device = [part.to(self.device) for part in index]
        named = (queries.cpu(), query_rope.cpu(), cache.nan_to_num().cpu())
        expected = mla_attention_reference(*named, *index, (latent + rope_dim) ** -0.5)
        for spread in (False, True):
            out, scale = self.poison(*queries.shape), (latent + rope_dim) ** -0.5
            attention_kernels.mla_attention(queries, query_rope, cache, *on_device, out, scale, spread_splits=spread)
            worst = max(worst, relative_error(out, expected))
        # The interpreter does not widen fp8 as the hardware does; the tests, which put that right, check it there.
        for stored in (torch.int8,) if self.small else (torch.int8, torch.float8_e4m3fn):
            pages = kv_cache.QuantizedLatents(
                torch.zeros(blocks + 1, 16, latent, dtype=torch.int8, device=self.device).view(stored),
                torch.zeros(blocks + 1, 16, rope_dim, dtype=torch.bfloat16, device=self.device),
                torch.zeros(blocks + 1, 16, device=self.device),
            )
            self.kernels.write_latent(down[:, :latent], down[:, latent:], pages, slots.to(self.device))
            host = kv_cache.QuantizedLatents(*(part.cpu() for part in pages))
            expected = mla_attention_reference(queries.cpu(), query_rope.cpu(), host, *index, scale)
            for spread in (False, True):
                attention_kernels.quantized_mla_attention(
                    queries, query_rope, *pages, *on_device, out, scale, spread_splits=spread
                )
                worst = max(worst, relative_error(out, expected))
        return worst

    def _lengths(self) -> list[tuple[int, int]]:
        return [(0, 5), (19, 20)] if self.small else [(0, 70), (599, 600), (1500, 1637), (2047, 2048)]


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

    def reference(self, window: int | None, cap: float | None) -> Tensor:
        tensors = [tensor.cpu() for tensor in (self.query, *self.caches, *self.index)]
        scales = {name: part.cpu() for name, part in zip(("key_scales", "value_scales"), self.scales, strict=False)}
        return paged_attention_reference(*tensors, self.dim**-0.5, window=window, softcap=cap, **scales)

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
        call = PagedCall(Checks(device, torch.bfloat16, False), heads, kv_heads, dim, lengths, stored)
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
    on = Inputs(device, torch.bfloat16, False)
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
    """Run every check. "cpu" means small sizes in Triton's interpreter, in fp32, without the checks of bits."""
    small = device == "cpu"
    result: dict[str, Any] = {"errors": {}, "failed": []}
    for dtype in (torch.float32,) if small else (torch.float32, torch.bfloat16):
        # The interpreter rounds to fp8 wrongly; the tests, which put that right, check it there.
        left_out = {"linear_fp8"} if small else set()
        kinds = [Checks, SamplingChecks, WeightChecks]
        if not small:  # it asks for bits, which the interpreter's products do not keep
            kinds.append(FewRowsChecks)
        every = [(kind, name) for kind in kinds for name in vars(kind) if not name.startswith("_")]
        for kind, name in every:
            if name in left_out:
                continue
            error = attempt(getattr(kind(device, dtype, small), name))
            label = f"{name} {str(dtype).removeprefix('torch.')}"
            result["errors"][label] = error
            allowed = ALLOWED.get(name, TOLERANCE[dtype])
            if isinstance(error, str) or not error <= allowed:
                result["failed"].append(label)
    if not small:
        questions = {"linear": linear_invariance, "attention": attention_invariance, "mla": mla_invariance}
        for name, question in questions.items():
            answer = attempt(question, device)
            result[f"{name}_invariance"] = answer
            if isinstance(answer, str) or not all(one["ok"] for one in answer.values()):
                result["failed"].append(f"{name}_invariance")
    return result


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call, or its traceback: one broken kernel must not hide the others."""
    try:
        return function(*arguments)
    except Exception:
        return traceback.format_exc(limit=-3)
