"""A step in which only other replicas have tokens: the ranks of this one hold experts that those need."""

from __future__ import annotations

from dataclasses import replace

import torch

from shardline.runtime.decoder import DecoderStage
from shardline.runtime.layers.moe import MoEFeedForward
from shardline.runtime.step import Rows


def run_empty_step(stage: DecoderStage, replica_tokens: tuple[int, ...], replica_samples: tuple[int, ...]) -> None:
    """Run the exchanges of a stage's layers with the other replicas; see `RankStep` for the counts."""
    rows = empty_rows(replica_tokens, replica_samples)
    for index, layer in enumerate(stage.layers, stage.first_layer):
        if stage.stream is not None:
            stage.stream.acquire(index)
        rows = layer.rows_left(rows)
        if isinstance(layer.feed_forward, MoEFeedForward):
            layer.feed_forward(stage.nothing, rows, stage.nothing)
        if stage.stream is not None:
            stage.stream.release(index)


def empty_rows(replica_tokens: tuple[int, ...], replica_samples: tuple[int, ...]) -> Rows:
    """The table of such a step."""
    none = torch.empty(0, dtype=torch.int64)
    rows = Rows(none, torch.zeros(1, dtype=torch.int32), none.int(), (), (), replica_samples)
    return replace(rows, replicas=replica_tokens, narrowed=rows)
