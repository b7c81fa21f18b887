"""Beam search: the likeliest outputs of a prompt, found a token at a time with the log probabilities of many tokens.

Each beam is a request of one token, whose prompt is all tokens so far; the prefix cache has most of it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from shardline.api.logprob_counts import LogprobCounts
from shardline.api.logprobs import Logprob, logprobs_by_token
from shardline.api.outputs import CompletionOutput, RequestOutput
from shardline.api.prompts import Prompt
from shardline.messages.request import AdapterRef, TokenLogprobs
from shardline.sampling_params import SamplingParams, StructuredOutputsParams, wrong_type
from shardline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from shardline.api.async_llm import AsyncLLM


class BeamSearchParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How beam search finds the likeliest outputs. Names and meanings are vLLM's.

    Raises:
        ValueError: a value is out of its range.
    """

    beam_width: int
    """Beams in each step, and outputs at the end."""
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Above 0, a token that is drawn is a candidate beside the most likely ones."""
    length_penalty: float = 1.0
    """Scores are log probabilities divided by the length, to this power."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    """Refused: a beam is made of requests, and none of them knows the grammar's state."""

    def __post_init__(self) -> None:
        if wrong := wrong_type(self):
            raise ValueError(wrong)
        if self.beam_width < 1 or self.max_tokens < 1:
            raise ValueError(
                f"beam_width and max_tokens must be at least 1, got {self.beam_width} and {self.max_tokens}"
            )
        if self.structured_outputs is not None:
            raise ValueError("structured_outputs are not supported with beam search: sample n choices instead")


@dataclass(frozen=True)
class Beam:
    """One output so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of each token, with the most likely ones in its place."""
    cumulative_logprob: float = 0.0
    finish_reason: Literal["stop", "length"] = "length"

    def extend(self, token_id: int, found: TokenLogprobs, rank: int, logprob: float, *, ends: bool) -> Beam:
        """The beam with one more token, for which the step `found` this rank and log probability."""
        own = TokenLogprobs(logprob, rank, found.top_ids, found.top_logprobs)
        total = self.cumulative_logprob + logprob
        return Beam([*self.token_ids, token_id], [*self.logprobs, own], total, "stop" if ends else "length")


@dataclass(frozen=True)
class BeamSearchSequence:
    """One output of `LLM.beam_search`, in vLLM's shape."""

    tokens: list[int]
    """The prompt and the output."""
    logprobs: list[dict[int, Logprob]]
    """Of each token of the output, with the most likely ones."""
    cum_logprob: float
    text: str
    """That of all tokens, the prompt's included."""
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class BeamSearchOutput:
    """The outputs of one prompt, best first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The search for one prompt. Run what `prompts` says, give `advance` the outputs, until `is_over`."""

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: BeamSearchParams,
        eos_token_ids: Sequence[int],
        max_model_len: int,
    ) -> None:
        self._prompt = list(prompt_token_ids)
        self._params = params
        self._ends = frozenset(() if params.ignore_eos else eos_token_ids)
        self._max_tokens = min(params.max_tokens, max_model_len - len(self._prompt))
        self._beams = [Beam()]
        self._completed: list[Beam] = []
        self._num_steps = 0

    @property
    def is_over(self) -> bool:
        """Whether no beam can grow."""
        return not self._beams or self._num_steps >= self._max_tokens

    def prompts(self) -> list[list[int]]:
        """The prompts of the next step, one for each beam."""
        return [self._prompt + beam.token_ids for beam in self._beams]

    def advance(self, outputs: Sequence[CompletionOutput]) -> None:
        """Take the outputs of a step, one for each of `prompts`, of `step_params`.

        Raises:
            RuntimeError: one of them is not whole.
        """
        grown: list[Beam] = []
        for beam, output in zip(self._beams, outputs, strict=True):
            if output.finish_reason in ("error", "abort"):
                raise RuntimeError(f"a step of beam search has failed: {output.error or 'it was aborted'}")
            assert output.token_logprobs is not None
            [found] = output.token_logprobs
            for token_id, rank, logprob in _candidates(output.token_ids[0], found):
                ends = token_id in self._ends
                child = beam.extend(token_id, found, rank, logprob, ends=ends)
                (self._completed if ends else grown).append(child)
        # Sorting is stable, and candidates come in an order that their bits decide, so equal scores are no matter.
        self._beams = sorted(grown, key=self._score, reverse=True)[: self._params.beam_width]
        self._num_steps += 1

    def best(self) -> list[Beam]:
        """The best outputs, best first."""
        every = sorted([*self._completed, *self._beams], key=self._score, reverse=True)
        return every[: self._params.beam_width]

    def output(self, tokenizer: Tokenizer) -> BeamSearchOutput:
        """The best outputs as `LLM` returns them: with the prompt, as in vLLM."""
        return BeamSearchOutput(
            [
                BeamSearchSequence(
                    tokens=self._prompt + beam.token_ids,
                    logprobs=[
                        logprobs_by_token(token_id, found, tokenizer.token_text)
                        for token_id, found in zip(beam.token_ids, beam.logprobs, strict=True)
                    ],
                    cum_logprob=beam.cumulative_logprob,
                    text=tokenizer.decode(self._prompt + beam.token_ids, self._params.skip_special_tokens),
                    finish_reason=beam.finish_reason,
                )
                for beam in self.best()
            ]
        )

    def choices(self, tokenizer: Tokenizer, top_logprobs: int | None) -> list[CompletionOutput]:
        """The best outputs as choices, without the token that ended them unless it is asked for.

        `top_logprobs`: how many of the most likely tokens they report; None: no log probabilities.
        """
        return [self._choice(index, beam, tokenizer, top_logprobs) for index, beam in enumerate(self.best())]

    def _choice(self, index: int, beam: Beam, tokenizer: Tokenizer, top_logprobs: int | None) -> CompletionOutput:
        params, ids, logprobs = self._params, beam.token_ids, beam.logprobs
        stopped = beam.finish_reason == "stop"
        detokenizer = tokenizer.detokenizer(self._prompt, skip_special_tokens=params.skip_special_tokens)
        text = detokenizer.add_tokens(ids[:-1] if stopped else ids) + detokenizer.flush_text()
        if stopped and not params.include_stop_str_in_output:
            ids, logprobs = ids[:-1], logprobs[:-1]
        cut = [TokenLogprobs(one.logprob, one.rank, one.top_ids[:top_logprobs], one.top_logprobs[:top_logprobs])
               for one in logprobs]  # fmt: skip
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=ids,
            token_logprobs=None if top_logprobs is None else cut,
            decode=tokenizer.token_text,
            finish_reason=beam.finish_reason,
        )

    def _score(self, beam: Beam) -> float:
        length = len(self._prompt) + len(beam.token_ids) - (beam.finish_reason == "stop")
        divisor: float = max(length, 1) ** self._params.length_penalty
        return beam.cumulative_logprob / divisor


def run_searches(
    searches: Sequence[BeamSearch], run_step: Callable[[list[list[int]]], Sequence[CompletionOutput]]
) -> None:
    """Run searches to their end, a step of all of them at a time; `run_step` runs prompts.

    Raises:
        RuntimeError: a step has failed.
    """
    while running := [search for search in searches if not search.is_over]:
        prompts = [search.prompts() for search in running]
        outputs = list(run_step([ids for own in prompts for ids in own]))
        for search, own in zip(running, prompts, strict=True):
            search.advance(outputs[: len(own)])
            del outputs[: len(own)]


async def search_async(
    llm: AsyncLLM,
    prompt: Prompt,
    params: BeamSearchParams,
    *,
    request_id: str,
    top_logprobs: int | None = None,
    priority: int = 0,
    cache_salt: str = "",
    adapter: AdapterRef | None = None,
) -> RequestOutput:
    """The likeliest outputs of a prompt as choices, best first; `top_logprobs`: see `BeamSearch.choices`.

    Raises:
        RuntimeError: a step has failed.
        ValueError, QueueFull, EngineDead, EngineDraining, EngineRecovering: see `AsyncLLM.submit`.
    """
    model = llm.require_open()
    tokenizer = model.builder.require_tokenizer()
    encoded = await model.builder.encode_prompt(prompt)
    if encoded.embeds is not None:
        raise ValueError("prompt_embeds are not supported with beam search")
    search = BeamSearch(encoded.token_ids, params, model.builder.eos_token_ids, model.max_model_len)
    sampling = step_params(params, llm.config.model.seed, model.builder.logprob_counts)
    for step in itertools.count():
        if step and search.is_over:
            break
        async with contextlib.AsyncExitStack() as stack:
            streams = []
            for index, beam in enumerate(search.prompts()):
                name = f"{request_id}-{step}-{index}"
                stream = await llm.submit(
                    beam, sampling, request_id=name, priority=priority, cache_salt=cache_salt, adapter=adapter
                )
                streams.append(await stack.enter_async_context(contextlib.aclosing(stream)))
            for stream in streams:
                async for _ in stream:
                    pass
        search.advance([stream.output.outputs[0] for stream in streams])
    return RequestOutput(
        request_id=request_id,
        prompt=encoded.text,
        prompt_token_ids=encoded.token_ids,
        outputs=search.choices(tokenizer, top_logprobs),
        finished=True,
        decode=tokenizer.token_text,
    )


def step_params(params: BeamSearchParams, seed: int, counts: LogprobCounts) -> SamplingParams:
    """The parameters of each request of a search: twice as many candidates as beams, as in transformers.

    Raises:
        ValueError: the engine was started for fewer log probabilities than so many beams need.
    """
    if params.beam_width > counts.most // 2:
        raise ValueError(
            f"beam_width must be at most {counts.most // 2}, got {params.beam_width}: a step needs two log "
            f"probabilities for each beam, and there are at most {counts.most} (--max-logprobs; -1 is the whole "
            "vocabulary)"
        )
    return SamplingParams(
        max_tokens=1,
        temperature=params.temperature,
        logprobs=2 * params.beam_width,
        seed=seed,
        detokenize=False,
        watermarking=False,
    )


def _candidates(token_id: int, found: TokenLogprobs) -> list[tuple[int, int, float]]:
    """The tokens of one place with their ranks and log probabilities: the chosen one, and the most likely ones."""
    entries = {token_id: (found.rank, found.logprob)}
    for rank, (other, logprob) in enumerate(zip(found.top_ids, found.top_logprobs, strict=True), 1):
        entries.setdefault(other, (rank, logprob))
    return [(other, rank, logprob) for other, (rank, logprob) in entries.items()]
