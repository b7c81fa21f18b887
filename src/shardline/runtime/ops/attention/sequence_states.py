"""The states of sequences in layers of linear attention."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SequenceStates(NamedTuple):
    """The states of sequences, each in its row; uninitialised where none is."""

    state: Tensor
    """[rows, value heads, key dim, value dim] float32."""
    recent: Tensor
    """[rows, taps - 1, channels]: what the convolution sees of the last tokens, in the activations' dtype."""


class SequenceRows(NamedTuple):
    """The sequences of a step, all int32."""

    query_starts: Tensor
    """[num_seqs + 1]: the first row of each."""
    context_lens: Tensor
    """[num_seqs]: its tokens, the new ones included. If all are new, its state begins as zero."""
    places: Tensor
    """[num_seqs]: the row of its state."""
