"""What adapters (LoRA) may change, and their bytes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from shardline.config.topology import RankPlace
from shardline.models.parameters import (
    counted_parameters,
    embeds_tokens,
    is_linear,
    kind_of,
    parameters,
    parse_name,
)
from shardline.models.partition import Span, split_dim
from shardline.models.parts import DTYPE_BYTES, DType, Parameters
from shardline.models.sharding import shard
from shardline.models.spec import DecoderSpec
from shardline.models.stored_layout import TensorEntry

EMBEDDING, LM_HEAD = "embed.weight", "lm_head.weight"
LARGEST_ALPHA = (2 - 2**-23) * 2.0**127
"""The largest number of fp32, in which scales are held; a scale is never larger than its alpha."""


@dataclass(frozen=True)
class LinearChange:
    """What an adapter adds to one linear, whose weight is the canonical parameter of this name."""

    name: str
    down: TensorEntry
    """[rank, in], perhaps with more rows"""
    up: TensorEntry
    """[rows of the checkpoint's tensor, rank], perhaps with more columns. Dims before the last two are flattened, those
    of `down` too."""
    rows: slice
    """The rows of `up` that belong to this linear."""
    rank: int
    scale: float
    transposed: bool = False
    """Whether `down` is [in, rank]."""
    interleaved_heads: int = 0
    """Rows of a head of `up`, if they are in GGUF's order, see `gguf.checkpoint.FoundPlace`; 0: in the model's."""
    expert: int = 0
    num_experts: int = 1
    """`down` stacks so many experts, and this linear belongs to `expert`."""
    in_columns: bool = False
    """Whether `up` has all of them side by side: the columns of an expert are `num_experts` apart."""
    magnitude: TensorEntry | None = None
    """[rows of the checkpoint's tensor]: the norms of the rows of the changed weight (DoRA); None: as they come."""


@dataclass(frozen=True)
class WholeWeight:
    """A weight that an adapter has in place of the base model's: that of the embedding or of the lm_head."""

    name: str
    weight: TensorEntry


def adaptable_parameters(spec: DecoderSpec) -> Parameters:
    """(name, [out, in]) of all that an adapter may change. The embedding is a linear of one-hot rows: [hidden, vocab].

    An adapter changes the embedding and the lm_head separately, even if the model ties them.
    """
    yield EMBEDDING, (spec.hidden_size, spec.vocab_size)
    for name, shape in parameters(spec):
        if name.endswith(".weight") and is_adaptable(name):
            yield name, shape
    if spec.num_labels is None:
        yield LM_HEAD, (spec.vocab_size, spec.hidden_size)


def is_adaptable(name: str) -> bool:
    """Whether an adapter may change the linear weight `name` of a layer: a projection of its attention, of its dense
    feed-forward block, or of an expert."""
    layer, part, _ = parse_name(name)
    return layer is not None and is_linear(name) and not part.startswith("token_input.")


def is_of_expert(name: str) -> bool:
    """Whether the parameter `name`, or parameters of this kind (`kind_of`), belong to experts."""
    return ".experts." in name


@functools.lru_cache(maxsize=512)
def adapter_bytes(
    spec: DecoderSpec,
    place: RankPlace,
    stages: tuple[Span, ...],
    dtype: DType,
    max_rank: int,
    kinds: frozenset[str],
    *,
    whole_experts: bool,
) -> int:
    """Bytes of an adapter of rank `max_rank` that changes all parameters of `kinds`, on the rank at `place`, which has
    whole experts, or its outputs of each.

    The rank holds the inner part, [rank, in], of each linear whole, and its own rows of the outer part, [out, rank],
    with a factor of each (DoRA). That of the embedding it holds whole, and those of whole experts.
    """
    stage, size = stages[place.pp_rank], len(place.peers("tensor"))
    total = factors = 0
    if embeds_tokens(spec, stage) and kind_of(EMBEDDING) in kinds:
        total += max_rank * (spec.vocab_size + spec.hidden_size)
        factors += spec.hidden_size
    if stage.stop == len(spec.layers) and kind_of(LM_HEAD) in kinds:
        own = shard(LM_HEAD, spec, place.share, size)[0]
        assert own is not None
        total += max_rank * (spec.hidden_size + own.size)
        factors += own.size
    for one in counted_parameters(spec, stage):
        if one.name.endswith(".weight") and is_adaptable(one.name) and kind_of(one.name) in kinds:
            outputs, inputs = one.shape
            span = shard(one.name, spec, place.share, size)[0]
            local, copies = outputs if span is None else span.size, one.num_layers
            if one.num_experts and whole_experts:
                peers = place.peers("expert")
                local, copies = outputs, copies * split_dim(one.num_experts, len(peers))[peers.index(place.rank)].size
            elif one.num_experts:
                copies *= one.num_experts
            total += copies * max_rank * (inputs + local)
            factors += copies * local
    return total * DTYPE_BYTES[dtype] + factors * DTYPE_BYTES["float32"]
