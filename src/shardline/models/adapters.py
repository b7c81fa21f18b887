"""Which linears adapters (LoRA) may change, and their bytes."""

from __future__ import annotations

import functools

from shardline.config.topology import RankPlace
from shardline.models.parameters import counted_parameters, expert_of, is_linear, parse_name
from shardline.models.partition import Span
from shardline.models.parts import DTYPE_BYTES, DType
from shardline.models.sharding import shard
from shardline.models.spec import DecoderSpec


def is_adaptable(name: str) -> bool:
    """Whether an adapter may change the linear weight `name`: a projection of a layer's attention or of its dense
    feed-forward block, or of the shared expert beside others."""
    layer, part, _ = parse_name(name)
    return layer is not None and is_linear(name) and expert_of(part) is None and not part.startswith("token_input.")


@functools.lru_cache(maxsize=512)
def adapter_bytes(spec: DecoderSpec, place: RankPlace, stages: tuple[Span, ...], dtype: DType, max_rank: int) -> int:
    """Bytes of an adapter of rank `max_rank` that changes all linears it can, on the rank at `place`.

    The rank holds the inner part, [rank, in], of each linear whole, and its own rows of the outer part, [out, rank].
    """
    total = 0
    for one in counted_parameters(spec, stages[place.pp_rank]):
        if one.name.endswith(".weight") and is_adaptable(one.name):
            outputs, inputs = one.shape
            span = shard(one.name, spec, place.share, len(place.peers("tensor")))[0]
            total += one.num_layers * max_rank * (inputs + (outputs if span is None else span.size))
    return total * DTYPE_BYTES[dtype]
