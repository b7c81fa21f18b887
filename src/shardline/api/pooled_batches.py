"""Batches of prompts for models that embed or classify: encode, embed, classify and score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from shardline.api.batch import MakeBar, RequestTimes, for_each
from shardline.api.outputs import ClassificationOutput, EmbeddingOutput, RequestOutput, ScoringOutput
from shardline.api.pooling import (
    Pooler,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    PoolingTask,
    cosine,
    pair_up,
    pooling_request,
)
from shardline.api.prompts import Prompt, as_prompts, split_prompt
from shardline.api.requests import RequestBuilder
from shardline.sampling_params import SamplingParams
from shardline.text.chat_template import ChatTemplate, Conversation, render_and_encode

T = TypeVar("T")
RunBatch = Callable[
    [Sequence[Prompt], Sequence[SamplingParams], bool | MakeBar, Sequence[int]],
    tuple[list[RequestOutput], list[RequestTimes]],
]
"""Runs prompts, with the parameters and the priority of each."""
_TRUNCATION = "truncate_prompt_tokens"


@dataclass(frozen=True)
class PooledBatches:
    """Pools prompts, for `runner="pooling"` and for classifiers. Errors of all methods:

    Raises:
        ValueError: the model cannot do it, or a prompt or parameter is invalid; then no prompt was run.
        RuntimeError: a prompt could not be run, for example because it needs more KV cache than there is.
    """

    pooler: Pooler | None
    builder: RequestBuilder
    run_batch: RunBatch

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | MakeBar = True,
        pooling_task: PoolingTask | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What each prompt is pooled to by `pooling_task`: `outputs.data` of each is a float32 array of numpy.

        `tokenization_kwargs` may have `truncate_prompt_tokens`: only so many of a prompt's last tokens are kept.
        """
        pooler = self._require_pooler()
        if pooling_task is None:
            raise ValueError(
                f"pooling_task required for LLM.encode: this model can do {' and '.join(pooler.tasks)}; LLM.embed, "
                "LLM.classify and LLM.score need none"
            )
        pooler.check_task(pooling_task)
        batch = self._truncated(as_prompts(prompts), tokenization_kwargs)
        params = _one_each(pooling_params, len(batch), pooling_task)
        outputs, _ = self.run_batch(batch, [pooling_request(pooling_task)] * len(batch), use_tqdm, [0] * len(batch))
        for number, output in enumerate(outputs):
            if output.outputs[0].finish_reason == "error":
                raise RuntimeError(f"prompt {number} could not be embedded: {output.outputs[0].error}")
        return [
            PoolingRequestOutput(
                output.request_id,
                PoolingOutput(pooler.pool(output, pooling_task, one)),
                output.prompt_token_ids,
                output.num_cached_tokens,
            )
            for output, one in zip(outputs, params, strict=True)
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool | MakeBar = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        dimensions: int | None = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """The vector of each prompt, `outputs.embedding`, which has the length 1: the final hidden state of its last
        token. `dimensions` is short for the one of `pooling_params`."""
        if dimensions is not None:
            pooling_params = PoolingParams(dimensions=dimensions)
        pooled = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            pooling_task="embed",
            tokenization_kwargs=tokenization_kwargs,
        )
        return [_replaced(one, EmbeddingOutput(one.outputs.data.tolist())) for one in pooled]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool | MakeBar = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """The scores of the model's labels for each prompt, `outputs.probs`."""
        pooled = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            pooling_task="classify",
            tokenization_kwargs=tokenization_kwargs,
        )
        return [_replaced(one, ClassificationOutput(one.outputs.data.tolist())) for one in pooled]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: bool | MakeBar = True,
        pooling_params: PoolingParams | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """How well the texts of each pair fit, `outputs.score`: one with each of the other side, or each with its own.

        Embeddings are compared by their cosine. A classifier of one label reads both texts, one after the other, or as
        `chat_template` writes the messages of the roles "query" and "document".
        """
        pooler = self._require_pooler()
        task = pooler.check_pairs()
        first, second = pair_up(data_1, data_2)
        options: dict[str, Any] = {"use_tqdm": use_tqdm, "pooling_task": task}
        options["tokenization_kwargs"] = tokenization_kwargs
        if task == "embed":
            pooled = self.encode([*first, *second], pooling_params, **options)
            left, right = pooled[: len(first)], pooled[len(first) :]
            return [
                PoolingRequestOutput(
                    f"{one.request_id}_{other.request_id}",
                    ScoringOutput(cosine(one.outputs.data, other.outputs.data)),
                    [*one.prompt_token_ids, *other.prompt_token_ids],
                    one.num_cached_tokens + other.num_cached_tokens,
                )
                for one, other in zip(left * (len(right) // len(left)), right, strict=True)
            ]
        pairs = list(zip(first * (len(second) // len(first)), second, strict=True))
        pooled = self.encode(self._join_pairs(pairs, chat_template), pooling_params, **options)
        return [_replaced(one, ScoringOutput(float(one.outputs.data[0]))) for one in pooled]

    def _require_pooler(self) -> Pooler:
        if self.pooler is None:
            raise ValueError(
                "this LLM generates; start it with runner='pooling' to embed prompts (LLM.encode, embed and score)"
            )
        return self.pooler

    def _truncated(self, batch: list[Prompt], options: Mapping[str, Any] | None) -> list[Prompt]:
        """The prompts as `tokenization_kwargs` asks for them."""
        if unknown := (options or {}).keys() - {_TRUNCATION}:
            raise ValueError(f"tokenization_kwargs has {sorted(unknown)[0]!r}; only {_TRUNCATION!r} is taken")
        most = (options or {}).get(_TRUNCATION)
        if most is None or most == -1:
            return batch
        if not isinstance(most, int) or most < 1:
            raise ValueError(f"{_TRUNCATION} must be at least 1, or -1")
        encoded: list[Prompt] = []
        for prompt in batch:
            text, ids = split_prompt(prompt)
            if ids is None:
                assert text is not None
                ids = self.builder.require_tokenizer().encode_text(text)
            encoded.append(ids[-most:])
        return encoded

    def _join_pairs(self, pairs: Sequence[tuple[str, str]], template_text: str | None) -> list[Prompt]:
        if template_text is None:
            return [query + document for query, document in pairs]
        tokenizer = self.builder.require_tokenizer()
        template = ChatTemplate(template_text, tokenizer.special_tokens)
        try:
            return [
                render_and_encode(template, tokenizer, pair_conversation(*pair), special_tokens_in_content=False)[1]
                for pair in pairs
            ]
        finally:
            template.close()


def _one_each(
    params: PoolingParams | Sequence[PoolingParams] | None, count: int, task: PoolingTask
) -> list[PoolingParams]:
    given = for_each(PoolingParams() if params is None else params, count, "pooling_params", PoolingParams)
    for one in given:
        if one.task not in (None, task):
            raise ValueError(f"You cannot overwrite pooling_params.task={one.task!r} with {task!r}!")
    return given


def _replaced(pooled: PoolingRequestOutput[PoolingOutput], outputs: T) -> PoolingRequestOutput[T]:
    """The same prompt with its numbers in another shape."""
    return PoolingRequestOutput(pooled.request_id, outputs, pooled.prompt_token_ids, pooled.num_cached_tokens)


def pair_conversation(query: str, document: str, variables: Mapping[str, Any] | None = None) -> Conversation:
    """A pair of texts as a chat template gets it."""
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    return Conversation(messages, None, variables or {}, add_generation_prompt=False, add_special_tokens=True)
