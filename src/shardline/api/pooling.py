"""What prompts are pooled to: vectors, the scores of labels, and how well two texts fit; in the shapes of vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardline.api.outputs import EMBEDDING_PARAMS, TOKEN_EMBEDDING_PARAMS, RequestOutput
from shardline.api.prompts import type_of
from shardline.checkpoints.classifier import LabelConfig
from shardline.checkpoints.folder_files import read_json
from shardline.sampling_params import SamplingParams

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
"""What a prompt becomes: a vector or the scores of labels, of its last token or of each of its tokens."""

Values = NDArray[np.float32]
T = TypeVar("T")


def pooling_request(task: PoolingTask) -> SamplingParams:
    """The parameters of a request that is pooled. No token is generated."""
    return TOKEN_EMBEDDING_PARAMS if task.startswith("token_") else EMBEDDING_PARAMS


class PoolingParams(msgspec.Struct, kw_only=True, frozen=True):
    """How prompts are pooled.

    Args:
        use_activation: whether vectors get the length 1, and logits become scores; None: they do.
        dimensions: of vectors, keep only so many of the first numbers; None: all.
        task: see `PoolingTask`; None: the one of the method.
    """

    use_activation: bool | None = None
    dimensions: int | None = None
    task: PoolingTask | None = None


@dataclass(frozen=True, eq=False)
class PoolingOutput:
    """The numbers of one prompt: [size], or [tokens, size] of a task for each token; float32."""

    data: Values


@dataclass(frozen=True)
class PoolingRequestOutput(Generic[T]):
    """A prompt and what it was pooled to."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


def check_pooling(folder: Path) -> None:
    """Refuse a model of the library sentence-transformers whose vectors are not its last token's.

    Raises:
        ValueError: they are others.
    """
    file = folder / "1_Pooling" / "config.json"
    if not file.is_file():
        return
    modes = [name.removeprefix("pooling_mode_") for name, value in read_json(file).items() if value is True]
    others = [mode for mode in modes if mode not in ("lasttoken", "include_prompt")]
    if others:
        raise ValueError(
            f"{file} makes a vector of all tokens ({', '.join(others)}), and here it is the last token's; use a model "
            "with pooling_mode_lasttoken, or remove the file, and combine what /pooling answers for token_embed"
        )


@dataclass(frozen=True)
class Pooler:
    """What a model makes of prompts that are not continued: a vector each, or logits of its labels."""

    hidden_size: int
    labels: LabelConfig | None = None
    """None: the model does not classify."""

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """What it can be asked for; the first one is what it does if it is not asked."""
        return ("embed", "token_embed") if self.labels is None else ("classify", "token_classify")

    @property
    def size(self) -> int:
        """How many numbers a prompt or token is pooled to."""
        return self.hidden_size if self.labels is None else len(self.labels.labels)

    def check_task(self, task: PoolingTask) -> None:
        """Refuse a task that the model cannot do.

        Raises:
            ValueError: it cannot.
        """
        if task in self.tasks:
            return
        if task not in get_args(PoolingTask):
            raise ValueError(f"there is no pooling task {task!r}; this model has {' and '.join(self.tasks)}")
        if self.labels is None:
            raise ValueError(
                "The model does not support the Classification API: it has no head for labels "
                "(ForSequenceClassification), and can embed"
            )
        raise ValueError("The model does not support the Embeddings API: it classifies (ForSequenceClassification)")

    def check_pairs(self) -> PoolingTask:
        """The task by which pairs of texts are scored: embeddings are compared, and one label is the score.

        Raises:
            ValueError: the model has several labels.
        """
        if self.labels is not None and len(self.labels.labels) != 1:
            raise ValueError(
                f"The model does not support the Score API, which is only enabled for num_labels == 1: it has "
                f"{len(self.labels.labels)} labels"
            )
        return self.tasks[0]

    def pool(self, output: RequestOutput, task: PoolingTask, params: PoolingParams | None = None) -> Values:
        """The numbers of a finished request: [size], or [tokens, size] of a task for each token.

        Raises:
            ValueError: vectors have fewer numbers than `dimensions`, or they are not vectors.
        """
        params = params or PoolingParams()
        rows = np.frombuffer(output.outputs[0].embedding, np.float32).reshape(-1, self.size)
        if params.dimensions is not None:
            if self.labels is not None:
                raise ValueError("dimensions are of vectors, and this model classifies")
            if not 1 <= params.dimensions <= self.size:
                raise ValueError(f"dimensions must be in [1, {self.size}], the size of this model's vectors")
            rows = rows[:, : params.dimensions]
        if params.use_activation is not False:
            rows = self._activate(rows.astype(np.float64)).astype(np.float32)
        return rows if task.startswith("token_") else rows[0]

    def _activate(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.labels is None:
            lengths = np.sqrt(np.square(rows).sum(axis=1, keepdims=True))
            np.divide(rows, lengths, out=rows, where=lengths > 0)
        elif self.labels.activation == "sigmoid":
            rows = np.exp(-np.logaddexp(0.0, -rows))
        elif self.labels.activation == "softmax":
            rows = np.exp(rows - rows.max(axis=1, keepdims=True))
            rows /= rows.sum(axis=1, keepdims=True)
        return rows


def cosine(first: Values, second: Values) -> float:
    """The cosine of the angle between two vectors; 0 if one has the length 0."""
    one, two = first.astype(np.float64), second.astype(np.float64)
    lengths = float(np.sqrt(np.square(one).sum() * np.square(two).sum()))
    return float((one * two).sum()) / lengths if lengths > 0.0 else 0.0


def _texts(side: str | Sequence[str]) -> list[str]:
    texts = list(side) if isinstance(side, Iterable) and not isinstance(side, (str, Mapping)) else [side]
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"pairs are of texts: give a text or a list of texts on each side; got {type_of(text)}")
    return texts


def pair_up(first: str | Sequence[str], second: str | Sequence[str]) -> tuple[list[str], list[str]]:
    """The texts of the pairs (first, second): one with each of the other side, or each with its own.

    Raises:
        ValueError: the numbers of texts do not fit, or something is no text.
    """
    texts, others = _texts(first), _texts(second)
    if len(texts) > 1 and len(texts) != len(others):
        raise ValueError("Input lengths must be either 1:1, 1:N or N:N")
    if not texts:
        raise ValueError("At least one text element must be given")
    if not others:
        raise ValueError("At least one text_pair element must be given")
    return texts, others
