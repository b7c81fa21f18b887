"""Engine outputs become request outputs: ids become text, and stop strings end it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from shardline.api.logprobs import Decode, decode_nothing
from shardline.api.outputs import CompletionOutput, RequestOutput
from shardline.api.requests import PreparedRequest
from shardline.api.resume import ChoiceSoFar
from shardline.messages.request import FinishReason, Request, SequenceOutput
from shardline.messages.timeline import ChoiceMetrics, EngineTimeline, RequestMetrics
from shardline.receipts.receipt import make_receipt
from shardline.sampling_params import SamplingParams
from shardline.text.stop_strings import StopMatcher
from shardline.text.tokenizer import Tokenizer


class ChoiceState:
    """One running choice. It adds tokens to its CompletionOutput one by one, however many tokens a step brings."""

    # Thousands of streams do not fit the caches, so every token pays for each line of memory that it touches.
    __slots__ = (
        "_detokenizer", "_eos_token_ids", "_make_receipt", "_matcher", "_params", "arrival", "first_token_time",
        "last_token_time", "num_cached_tokens", "output", "timeline",
    )  # fmt: skip

    def __init__(
        self, output: CompletionOutput, request: PreparedRequest, child: Request, tokenizer: Tokenizer | None
    ) -> None:
        params = request.params
        self.output = output
        self._params = params
        self._detokenizer = (
            tokenizer.detokenizer(
                request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                shown_token_ids=request.shown_token_ids,
            )
            if tokenizer is not None
            else None
        )
        self._matcher: StopMatcher | None = None
        if params.stop_strings:
            self._matcher = StopMatcher(params.stop_strings, params.include_stop_str_in_output)
        contract = request.contract
        self._make_receipt = None if contract is None else partial(make_receipt, contract, child)
        self.arrival = child.arrival_time
        self.first_token_time = 0.0
        self.last_token_time = 0.0
        self.timeline = EngineTimeline()
        self.num_cached_tokens = 0
        self._eos_token_ids = () if params.ignore_eos else child.eos_token_ids

    def add_output(self, step: SequenceOutput, now: float) -> bool:
        """Add the tokens of a step. Returns whether a stop string ended the choice; then the engine must be told."""
        if step.timeline is not None and self._continues(step.timeline):
            self.timeline, self.num_cached_tokens = step.timeline, step.num_cached_tokens
        if step.token_ids:
            self.last_token_time = now
            if not self.first_token_time:
                self.first_token_time = now
        shown = step.token_ids
        if step.finish_reason == "stop" and self._hides_stop_token(step):
            shown = shown[:-1]
        if self._matcher is None:
            if self._detokenizer is not None:
                self.output.text += self._detokenizer.add_tokens(shown)
        elif (count := self._find_stop(self._matcher, shown)) is not None:
            self._append_tokens(step, count)
            self._set_finished("stop", self._matcher.match)
            return step.finish_reason is None
        self._append_tokens(step, len(step.token_ids))
        if step.finish_reason is not None:
            self._end_with_step(step)
        return False

    def replay(self, so_far: ChoiceSoFar) -> None:
        """Begin after an output that was reported elsewhere: what follows is as if it had been made here.

        Raises:
            ValueError: it has come to its end.
        """
        self.add_output(so_far.as_step(), 0.0)
        if so_far.finished:
            self._set_finished("stop", None)
        elif self.output.finished():
            raise ValueError("resume has a choice that has reached a stop string and is not finished")

    def _continues(self, timeline: EngineTimeline) -> bool:
        """Whether a timeline is of the engine that began the output; after a failover, another one goes on."""
        return self.timeline.first_token < 0 or timeline.scheduled == self.timeline.scheduled

    def metrics(self) -> ChoiceMetrics:
        """Where the time of the choice has gone so far."""
        timeline = self.timeline
        scheduled, first = timeline.scheduled, timeline.first_token
        has_begun = self.first_token_time > 0
        return ChoiceMetrics(
            index=self.output.index,
            finish_reason=self.output.finish_reason,
            num_generation_tokens=len(self.output.token_ids),
            num_cached_tokens=self.num_cached_tokens,
            queued_seconds=scheduled if scheduled >= 0 else None,
            prefill_seconds=first - scheduled if first >= 0 else None,
            first_token_seconds=self.first_token_time - self.arrival if has_begun else None,
            decode_seconds=self.last_token_time - self.first_token_time if has_begun else None,
            prefill_chunks=timeline.prefill_chunks,
            preemptions=timeline.preemptions,
            num_guessing_steps=timeline.num_guessing_steps,
            num_guesses=timeline.num_guesses,
            num_right_guesses=timeline.num_right_guesses,
        )

    def abort(self) -> None:
        """End the choice with the text that it has."""
        if not self.output.finished():
            self._flush_text()
            self._set_finished("abort", None)

    def fail(self, message: str, *, refused: bool = False) -> None:
        """End the choice with an error, and with the text that it has. `refused`: the request is at fault."""
        self.output.error, self.output.refused = message, refused
        self._set_finished("error", None)

    def _append_tokens(self, step: SequenceOutput, count: int) -> None:
        """Add the first `count` tokens of a step, without their text."""
        output = self.output
        output.token_ids += step.token_ids[:count]
        if output.token_logprobs is not None and step.logprobs is not None:
            output.token_logprobs += step.logprobs[:count]
        if output.digests is not None and step.digests is not None:
            output.digests += step.digests[:count]

    def _find_stop(self, matcher: StopMatcher, token_ids: Sequence[int]) -> int | None:
        """Add the text of tokens, up to the one that completes a stop string. Returns how many these are; None: no
        token completes one."""
        if self._detokenizer is None:
            return None
        for count, token_id in enumerate(token_ids, 1):
            text = self._detokenizer.add_tokens([token_id])
            if len(self.output.token_ids) + count <= self._params.min_tokens:
                self.output.text += text
                continue
            self.output.text += matcher.add_text(text)
            if matcher.match is not None:
                return count
        return None

    def _hides_stop_token(self, step: SequenceOutput) -> bool:
        return step.stop_token_id is not None and not self._params.include_stop_str_in_output

    def _end_with_step(self, step: SequenceOutput) -> None:
        assert step.finish_reason is not None
        self._flush_text()
        if self._matcher is not None and self._matcher.match is not None:
            self._set_finished("stop", self._matcher.match)
        elif step.finish_reason == "error":
            self.fail(step.error, refused=step.refused)
        else:
            eos = step.stop_token_id in self._eos_token_ids
            self._set_finished(step.finish_reason, None if eos else step.stop_token_id)

    def _flush_text(self) -> None:
        """Add the text that was held back: incomplete characters become U+FFFD."""
        if self._detokenizer is None:
            return
        text = self._detokenizer.flush_text()
        if self._matcher is not None:
            text = self._matcher.add_text(text) + self._matcher.flush_text()
        self.output.text += text

    def _set_finished(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        output = self.output
        output.finish_reason = reason
        output.stop_reason = stop_reason
        if self._make_receipt is not None and reason != "error":
            output.receipt = self._make_receipt(output.token_ids, output.digests or ())


class RequestState:
    """One running user request: its RequestOutput, and the choices that add to it."""

    __slots__ = ("choices", "is_counted", "output", "request")

    def __init__(self, request: PreparedRequest, tokenizer: Tokenizer | None) -> None:
        params: SamplingParams = request.params
        if not params.detokenize:
            tokenizer = None
        self.request = request
        decode: Decode = decode_nothing if tokenizer is None else tokenizer.token_text
        self.output = RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            decode=decode,
            outputs=[
                CompletionOutput(
                    index=child.choice,
                    token_logprobs=None if params.logprobs is None else [],
                    decode=decode,
                    digests=[] if request.children[0].sampling.logits_digest else None,
                )
                for child in request.children
            ],
        )
        pairs = zip(self.output.outputs, request.children, strict=True)
        self.choices = [ChoiceState(output, request, child, tokenizer) for output, child in pairs]
        if request.so_far is not None:
            self.output.num_cached_tokens = request.so_far.num_cached_tokens or 0
            for choice, so_far in zip(self.choices, request.so_far.choices, strict=True):
                choice.replay(so_far)
        self.is_counted = request.so_far is not None and request.so_far.num_cached_tokens is not None
        """Whether the usage has the number of cached tokens already."""

    def metrics(self) -> RequestMetrics:
        """Where the time has gone so far."""
        choices = [choice.metrics() for choice in self.choices]
        state, first = self.choices[0], choices[0]
        queued = state.arrival
        return RequestMetrics(
            arrival_time=time.time() - (time.monotonic() - state.arrival),
            queued_ts=queued,
            scheduled_ts=0.0 if first.queued_seconds is None else queued + first.queued_seconds,
            first_token_ts=state.first_token_time,
            last_token_ts=state.last_token_time,
            first_token_latency=first.first_token_seconds or 0.0,
            num_generation_tokens=first.num_generation_tokens,
            choices=choices,
        )

    def finish(self) -> None:
        """Note that every choice has ended."""
        self.output.finished = True
        self.output.metrics = self.metrics()

    def unfinished_children(self) -> list[Request]:
        """The engine requests that still run, or are to."""
        pairs = zip(self.request.children, self.output.outputs, strict=True)
        return [child for child, output in pairs if output.finish_reason is None]
