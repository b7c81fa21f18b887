"""Vectors of prompts: what the engine sends, cut and normalized."""

from __future__ import annotations

import math
import operator
from array import array
from dataclasses import dataclass

from shardline.api.outputs import RequestOutput
from shardline.sampling_params import SamplingParams

EMBEDDING_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
"""The parameters of a request that is embedded. No token is generated."""


@dataclass(frozen=True)
class Embedding:
    """The vector of one prompt."""

    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingOutput:
    """A prompt and its vector, in vLLM's shape."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: Embedding
    finished: bool = True


def normalized_embedding(output: RequestOutput, dimensions: int | None = None) -> array[float]:
    """The vector of a finished request, float32, of length 1; `dimensions`: keep only so many of its first numbers.

    Raises:
        ValueError: the vector has fewer numbers.
    """
    values = array("f", output.outputs[0].embedding)
    if dimensions is not None:
        if not 1 <= dimensions <= len(values):
            raise ValueError(f"dimensions must be in [1, {len(values)}], the size of this model's vectors")
        values = values[:dimensions]
    length = math.sqrt(math.fsum(map(operator.mul, values, values)))
    return array("f", [value / length for value in values]) if length > 0.0 else values
