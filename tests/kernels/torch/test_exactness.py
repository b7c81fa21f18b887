"""The check at start: it passes here, and finds planted faults."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor

from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.kernels.torch import exactness, linear, packed
from shardline.kernels.torch.exactness import check_exactness
from shardline.kernels.torch.linear import COLUMNS, DenseKernels
from shardline.kernels.torch.torch_kernels import TorchKernels
from shardline.runtime.machines import open_backend
from shardline.runtime.parallel.groups import make_single_rank_groups
from shardline.runtime.worker import Worker


def kernels(dtype: torch.dtype = torch.float32) -> TorchKernels:
    own = TorchKernels(torch.device("cpu"))
    own.weight_empty(dtype, 3, 77)
    return own


def nudged(x: Tensor) -> Tensor:
    """The first element of each row is the next number."""
    x = x.clone()
    x[..., 0] = torch.nextafter(x[..., 0].float(), torch.tensor(torch.inf)).to(x.dtype) * (1 + 2**-7)
    return x


def test_exact_numerics_hold_here(dtype: torch.dtype) -> None:
    own = kernels(dtype)
    own.weight_empty(dtype, 300, 91, num_matrices=2)  # those of experts stay plain
    check_exactness(own, dtype)
    assert own.packed is not None
    both = {dtype, torch.float32}
    assert own.packed.whole == {(own_dtype, 1, 77) for own_dtype in both}, "on x86, tiles have the bits of the whole"
    assert own.whole == {(own_dtype, 3, 91) for own_dtype in both}


def _few_rows(product: Callable[..., Tensor], x: Tensor, *rest: Any, **more: Any) -> Tensor:
    return nudged(product(x, *rest, **more)) if len(x) == 1 else product(x, *rest, **more)


def _place_of_row(product: Callable[..., Tensor], x: Tensor, *rest: Any) -> Tensor:
    out = product(x, *rest)
    return torch.cat([nudged(out[:1]), out[1:]])


def _place_of_column(product: Callable[..., Tensor], x: Tensor, *rest: Any) -> Tensor:
    return nudged(product(x, *rest))


def _many_rows(product: Callable[..., Tensor], x: Tensor, *rest: Any) -> Tensor:
    return nudged(product(x, *rest)) if len(x) > 100 else product(x, *rest)


def _threads(product: Callable[..., Tensor], x: Tensor, *rest: Any) -> Tensor:
    return nudged(product(x, *rest)) if torch.get_num_threads() > 1 else product(x, *rest)


@pytest.mark.parametrize("fault", [_few_rows, _place_of_row, _place_of_column, _many_rows, _threads])
def test_a_product_that_depends_on_its_place_is_refused(fault: Callable[..., Tensor]) -> None:
    own = kernels()
    product = own.multiply
    own.multiply = lambda *arguments: fault(product, *arguments)  # type: ignore[method-assign]
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match=r"products of 77 columns.* have other bits .*; use --numerics fast"):
            check_exactness(own, torch.float32)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_so_is_a_norm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = getattr(torch.nn.functional, name)
    monkeypatch.setattr(torch.nn.functional, name, lambda x, *rest, **more: _few_rows(function, x, *rest, **more))
    with pytest.raises(ValueError, match="norms of 77 elements have other bits"):
        check_exactness(kernels(), torch.float32)


def test_so_is_a_product_of_adapters() -> None:
    own = kernels()
    own.low_rank_empty(1, 20, 77, (3,), torch.float32)
    check_exactness(own, torch.float32)
    product = own.multiply_low_rank
    for rank, fault in ((16, _few_rows), (32, _place_of_row), (32, _place_of_column)):

        def faulty(x: Tensor, down: Tensor, *rest: Any, rank: int = rank, fault: Any = fault) -> Tensor:
            return fault(product, x, down, *rest) if 16 * len(down) == rank else product(x, down, *rest)

        setattr(own, "multiply_low_rank", faulty)  # noqa: B010
        with pytest.raises(ValueError, match=f"adapters of rank {rank} have other bits"):
            check_exactness(own, torch.float32)


def test_so_is_a_function_that_ends_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own sigmoid does, for numbers beyond the last whole vector."""
    tanh = torch.tanh

    def fault(x: Tensor) -> Tensor:
        out = tanh(x)
        out[-1] = torch.nextafter(out[-1], torch.tensor(2.0))
        return out

    fault.__name__ = "tanh"
    monkeypatch.setattr(exactness, "_CURVES", (torch.exp, fault))
    with pytest.raises(ValueError, match=r"torch.tanh have other bits"):
        check_exactness(kernels(), torch.float32)


def test_ranks_of_unlike_libraries_answer_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    here = exactness.known_answer(kernels())
    assert exactness.known_answer(kernels()) == here
    monkeypatch.setattr(exactness, "_CURVES", (torch.exp, torch.sigmoid))
    assert exactness.known_answer(kernels()) != here


def test_so_is_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    own = kernels()
    attention = own.paged_attention

    def fault(query: Tensor, *rest: Any) -> None:
        attention(query, *rest)
        if len(query) == 1:
            rest[5].copy_(nudged(rest[5]))

    monkeypatch.setattr(own, "paged_attention", fault)
    with pytest.raises(ValueError, match="attention have other bits"):
        check_exactness(own, torch.float32)


@pytest.mark.parametrize(("module", "name"), [(torch.nn.functional, "linear"), (exactness, "multiply_packed")])
def test_whole_products_with_other_bits_are_not_used(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    product = getattr(module, name)
    is_packed = name == "multiply_packed"

    def fault(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found = product(x, weight, bias)
        return nudged(found) if len(weight) > COLUMNS else found

    monkeypatch.setattr(module, name, fault)
    own = TorchKernels(torch.device("cpu"))
    weight = own.weight_empty(torch.float32, 300, 77, num_matrices=None if is_packed else 1)
    check_exactness(own, torch.float32)
    assert own.packed is not None
    assert (own.whole, own.packed.whole) == (set(), set())
    tiles = weight.fill_(1.0) if is_packed else weight[0].fill_(1.0)
    assert torch.equal(own.multiply(torch.ones(100, 77), tiles, None, torch.float32), torch.full((100, 384), 77.0))
    if is_packed:
        parts = own.packed.parts(tiles, torch.float32, exact=True)
        assert parts is not None
        assert [len(part) for part in parts] == [COLUMNS] * 3


def test_weights_stay_plain_where_packed_products_depend_on_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "multiply_packed", partial(_many_rows_nudged, packed.multiply_packed))
    own = TorchKernels(torch.device("cpu"))
    tiles = own.weight_empty(torch.float32, 100, 77).fill_(1.0)
    check_exactness(own, torch.float32)
    assert own.packed is None
    assert own.whole == {(torch.float32, 1, 77)}
    assert torch.equal(own.multiply(torch.ones(3, 77), tiles, None, torch.float32)[:, :100], torch.full((3, 100), 77.0))


def _many_rows_nudged(product: Callable[..., Tensor], x: Tensor, *rest: Any) -> Tensor:
    return nudged(product(x, *rest)) if len(x) > 16 else product(x, *rest)


def test_fast_numerics_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal is one of the load, so that `serve` ends with 2."""
    monkeypatch.setattr(DenseKernels, "multiply", partialmethod(_few_rows_of, DenseKernels.multiply))
    for numerics in ("exact", "fast"):
        setup = resolve_here(EngineConfig.from_options(kernels="torch", numerics=numerics, kv_cache_memory="64MiB"))
        worker = Worker(setup, open_backend("cpu", 0, 1, setup.kernels), make_single_rank_groups())
        if numerics == "fast":
            worker.load()
        else:
            with pytest.raises(ValueError, match="use --numerics fast"):
                worker.load()


def _few_rows_of(own: DenseKernels, product: Callable[..., Tensor], x: Tensor, *rest: Any) -> Tensor:
    return nudged(product(own, x, *rest)) if len(x) == 1 else product(own, x, *rest)
