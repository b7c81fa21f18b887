"""A step as tensors, the input of a stage's layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from shardline.runtime.sampling.inputs import SamplingInput


@dataclass(frozen=True)
class KVGroupInput:
    """Where the layers of one KV group read and write keys and values."""

    block_tables: Tensor
    """[num_seqs, max_blocks] int32"""
    slots: Tensor
    """[num_tokens] int64: block id * block_size + offset of each new token."""


@dataclass(frozen=True)
class SampledTokens:
    """The tokens of a step whose logits are sampled or scored. Once the last keys and values are stored, layers compute
    only these."""

    rows: Tensor
    """[num_samples] int64: indices of the tokens in the step."""
    query_starts: Tensor
    """[num_sampled_seqs + 1] int32: index into `rows` of the first token of each sampled sequence."""
    context_lens: Tensor
    """[num_sampled_seqs] int32: KV length of each sampled sequence at its last row."""
    block_tables: tuple[Tensor, ...]
    """One for each KV group, [num_sampled_seqs, max_blocks] int32."""


@dataclass(frozen=True)
class ScoredTokens:
    """Which of a step's sampled tokens tell how likely the prompt's next token was, and which are really sampled."""

    rows: Tensor
    """[num_scored] int64: indices into the sampled tokens."""
    targets: Tensor
    """[num_scored] int64: the id of the prompt's next token after each of these."""
    sampled: Tensor
    """[num_sampled_seqs] int64: indices of the tokens whose logits are sampled."""


@dataclass(frozen=True)
class Queries:
    """Tokens of a step that attend to the keys of one KV group."""

    rows: Tensor | None
    """[num_queries] int64: indices of the tokens in the step; None: all tokens, in order."""
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
    """Number of tokens of each replica in lockstep, this replica included."""
    replica_samples: tuple[int, ...]
    """Number of sampled tokens of each replica in lockstep."""
    sampled: SampledTokens | None
    """None: all tokens are sampled, in order."""
    greedy: bool = False
    """Whether only the largest logit of each row is needed."""
    allowed: Tensor | None = None
    """[num_samples, ceil(local vocab / 64)] int64: in a greedy step, the bits of the tokens of this rank's part of the
    vocabulary that each row may have. None: all."""
    sampling: SamplingInput | None = None
    """The sampler's input on a device. None if nothing is sampled, and on the host, where the sampler reads its
    plan."""
    scored: ScoredTokens | None = None
    """None: all of `sampled` are sampled, and none is scored."""
    token_inputs: Tensor | None = None
    """[num_tokens, layers of the stage, 2, local size]: see `layers.token_input`. None: the model has none."""
    is_replayable: bool = False
    """Whether this is a decode step that can be replayed: all decode steps of as many sequences use the same memory."""

    def queries(self, group: int, selects: bool) -> Queries:
        """The tokens that attend in a layer of a KV group; only the sampled ones, if the layer `selects` them.

        The last layer that stores keys and values does so, because nothing reads the other tokens' outputs.
        """
        if selects and self.sampled is not None:
            sampled = self.sampled
            return Queries(sampled.rows, sampled.query_starts, sampled.context_lens, sampled.block_tables[group])
        return Queries(None, self.query_starts, self.context_lens, self.kv_groups[group].block_tables)

    def sampled_only(self) -> StepInput:
        """The step for layers that store nothing: all of its tokens are the sampled ones of this step."""
        sampled = self.sampled
        if sampled is None:
            return self
        rows, tables = sampled.rows, sampled.block_tables
        return replace(
            self,
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            query_starts=sampled.query_starts,
            context_lens=sampled.context_lens,
            kv_groups=tuple(
                KVGroupInput(table, group.slots[rows]) for table, group in zip(tables, self.kv_groups, strict=True)
            ),
            replica_tokens=self.replica_samples,
            sampled=None,
            token_inputs=None if self.token_inputs is None else self.token_inputs[rows],
        )
