"""A step as tensors: what the layers of a stage read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardline.runtime.sampling.inputs import SamplingInput


@dataclass(frozen=True)
class KVGroupInput:
    """Where the layers of one KV group find and put keys and values."""

    block_tables: Tensor
    """[num_seqs, max_blocks] int32"""
    slots: Tensor
    """[num_tokens] int64: block id * block_size + offset of each new token."""


@dataclass(frozen=True)
class SampledTokens:
    """The tokens of a step whose logits are sampled: all that the last layer computes beyond keys and values."""

    rows: Tensor
    """[num_samples] int64: which tokens of the step."""
    query_starts: Tensor
    """[num_sampled_seqs + 1] int32: first of `rows` of each sequence that has any."""
    context_lens: Tensor
    """[num_sampled_seqs] int32: KV length of each at its last row."""
    block_tables: tuple[Tensor, ...]
    """Of each KV group, [num_sampled_seqs, max_blocks] int32."""


@dataclass(frozen=True)
class Queries:
    """Tokens of a step that attend to the keys of one KV group."""

    rows: Tensor | None
    """[num_queries] int64: which tokens of the step; None: all, in order."""
    starts: Tensor
    context_lens: Tensor
    block_tables: Tensor


@dataclass(frozen=True)
class StepInput:
    """All sequences of a step, their new tokens one after another."""

    token_ids: Tensor
    """[num_tokens] int64"""
    positions: Tensor
    """[num_tokens] int64"""
    query_starts: Tensor
    """[num_seqs + 1] int32: first token of each sequence."""
    context_lens: Tensor
    """[num_seqs] int32: KV length of each sequence once the new tokens are stored."""
    kv_groups: tuple[KVGroupInput, ...]
    replica_tokens: tuple[int, ...]
    """num_tokens of each replica in lockstep, this one's own included."""
    replica_samples: tuple[int, ...]
    """How many of them are sampled, of each replica."""
    sampled: SampledTokens | None
    """None: all tokens are sampled, in order."""
    greedy: bool = False
    """Whether nothing is wanted of a row of logits but its largest."""
    sampling: SamplingInput | None = None
    """What the sampler reads on a device; None on the host, where it has a plan, and where nothing is sampled."""
    is_replayable: bool = False
    """Whether this is a decode step, and every one of as many sequences is written to the same memory."""

    def queries(self, group: int, last_layer: bool) -> Queries:
        """Who attends in a layer of a KV group. In a model's last layer nobody reads what else would come out."""
        if last_layer and self.sampled is not None:
            sampled = self.sampled
            return Queries(sampled.rows, sampled.query_starts, sampled.context_lens, sampled.block_tables[group])
        return Queries(None, self.query_starts, self.context_lens, self.kv_groups[group].block_tables)
