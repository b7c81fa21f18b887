"""Adapters whose files are written while a rank reads them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from shardline.checkpoints.adapter_targets import chosen_kinds
from shardline.checkpoints.adapters import WEIGHTS_FILE, read_adapter
from shardline.checkpoints.description import read_model
from shardline.config.engine import ModelConfig
from shardline.deployment.deployment import AdapterPlan
from shardline.models.partition import Span
from shardline.runtime.loader.adapters import load_adapter
from tests.models.adapters import make_adapter
from tests.models.checkpoints import make_checkpoint


class _Linear:
    """A whole linear with one slot."""

    own_whole = Span(0, 0)

    def __init__(self, name: str, rows: int, on_put: Callable[[], None]) -> None:
        self.names: tuple[str, ...] = (name,)
        self.spans: tuple[Span, ...] = (Span(0, rows),)
        self.is_empty = True
        self._on_put = on_put

    def clear(self, slot: int) -> None:
        self.is_empty = True

    def put(self, slot: int, part: int, down: Tensor, up: Tensor, scale: float, magnitude: Tensor | None) -> None:
        self.is_empty = False
        self._on_put()

    def put_whole(self, slot: int, rows: Tensor) -> None:
        raise AssertionError


@pytest.mark.parametrize("how", ["cut", "written", "gone"])
def test_files_that_change_while_they_are_read_are_refused(how: str, tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path / "model")
    make_adapter(model, tmp_path / "adapter")
    file = tmp_path / "adapter" / WEIGHTS_FILE

    def change() -> None:
        if how == "cut":
            os.truncate(file, 0)
        elif how == "written":
            os.utime(file, ns=(0, 0))
        else:
            file.unlink(missing_ok=True)

    spec = read_model(ModelConfig(model=str(model))).spec()
    adapter = read_adapter(tmp_path / "adapter", spec, 16)
    linears = [_Linear(one.name.removesuffix(".weight"), one.up.shape[0], change) for one in adapter.linears]
    plan = AdapterPlan(1, 16, (), tuple(chosen_kinds(spec)))
    with pytest.raises(ValueError, match=r"has changed since|cannot be read"):
        load_adapter(linears, 0, tmp_path / "adapter", adapter.digest(), spec, plan)
    assert all(linear.is_empty for linear in linears)
