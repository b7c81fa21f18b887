"""The bytes of a GGUF file's tensors, for the planner. A file mixes types, so each weight has a packing of its own."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass

from shardline.checkpoints.gguf.checkpoint import GGUFCheckpoint
from shardline.checkpoints.gguf.header import PLAIN_TYPES, BlockType
from shardline.models.parameters import Shape, is_linear, layer_parameters, parameters
from shardline.models.spec import DecoderSpec
from shardline.models.stored_weights import Packing, StoredWeights


@dataclass(frozen=True, eq=False)
class GGUFStoredWeights(StoredWeights):
    """See `StoredWeights`. Headers say how each linear weight is packed."""

    checkpoint: GGUFCheckpoint
    spec: DecoderSpec

    def layer_class(self, index: int) -> Hashable:
        """Equal for layers whose weights are packed alike."""
        names = (part for part, _ in layer_parameters(self.spec.layers[index], self.spec.hidden_size, num_experts=1))
        return tuple(self.packing(f"layers.{index}.{name}") for name in names)

    def _find_packing(self, name: str) -> Packing | None:
        shape = self._shapes.get(name)
        if shape is None:
            return None
        kind = self.checkpoint.find(name, shape, self.spec).tensor.type
        return None if kind.name in PLAIN_TYPES else packing_of(kind)

    @functools.cached_property
    def _shapes(self) -> dict[str, Shape]:
        return {name: shape for name, shape in parameters(self.spec) if is_linear(name) and name != "lm_head.weight"}


def packing_of(kind: BlockType) -> Packing:
    """The bytes of weights of a type: whole bits for each element, and the rest for each block."""
    bits = 8 * kind.block_bytes // kind.block_elements
    rest = kind.block_bytes - bits * kind.block_elements // 8
    return Packing(kind.name.lower(), bits, block_rows=1, block_columns=kind.block_elements, scale_bytes=rest)
