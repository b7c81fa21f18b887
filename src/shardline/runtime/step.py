"""A step as tensors: what the layers of a stage read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class KVGroupInput:
    """Where the layers of one KV group find and put keys and values."""

    block_tables: Tensor
    """[num_seqs, max_blocks] int32"""
    slots: Tensor
    """[num_tokens] int64: block id * block_size + offset of each new token."""


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
    sample_rows: Tensor | None
    """[num_samples] int64: tokens whose logits are sampled; None: all of them, in order."""
