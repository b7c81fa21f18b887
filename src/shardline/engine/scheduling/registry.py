"""The requests in the engine, from their arrival to their last output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardline.engine.kv_cache import KVCache
from shardline.engine.scheduling.sequence import LiveSequence
from shardline.messages.request import FinishReason, Request, SequenceOutput
from shardline.messages.step import SequenceResult


@dataclass
class Totals:
    """Counters since the engine's start; see EngineStats."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    step_seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of prompts whose first token has come, and of answers."""
        return self.prompt_tokens + self.generation_tokens


class RequestRegistry:
    """Turns requests into sequences and results into outputs, and counts their tokens."""

    def __init__(self, kv: KVCache, *, max_model_len: int) -> None:
        self.totals = Totals()
        self._kv = kv
        self._max_model_len = max_model_len
        self._by_id: dict[str, LiveSequence] = {}
        self._num_added = 0
        self._outputs: list[SequenceOutput] = []

    @property
    def num_live(self) -> int:
        """Sequences that have not had their last output."""
        return len(self._by_id)

    @property
    def has_outputs(self) -> bool:
        """Whether `take_outputs` would return any."""
        return bool(self._outputs)

    def add_request(self, request: Request) -> LiveSequence | None:
        """The request as a new sequence. None: it can never run, and `take_outputs` has an error for it."""
        prompt = request.prompt_token_ids
        most = request.sampling.max_tokens
        limit = self._max_model_len if most is None else min(len(prompt) + most, self._max_model_len)
        error = self._refusal(len(prompt), limit)
        if error:
            self._outputs.append(SequenceOutput(request.request_id, [], finish_reason="error", error=error))
            return None
        assert request.request_id not in self._by_id, "a request was added twice"
        order = (request.priority, request.arrival_time, self._num_added)
        self._num_added += 1
        sequence = LiveSequence(request, limit, order, prompt + request.output_token_ids, self._kv.new_state())
        self._by_id[request.request_id] = sequence
        return sequence

    def _refusal(self, num_prompt_tokens: int, limit: int) -> str:
        if num_prompt_tokens == 0:
            return "the prompt is empty; send at least one token"
        if num_prompt_tokens >= self._max_model_len:
            return (
                f"the prompt has {num_prompt_tokens} tokens, and prompt and output together may have "
                f"{self._max_model_len}; send a shorter prompt or raise --max-model-len"
            )
        # The last token is never computed. If blocks are short, a step may have only one token.
        needed = self._kv.blocks_of_request(limit - 1, 1)
        if needed > self._kv.pool.num_usable:
            return (
                f"{num_prompt_tokens} prompt tokens and up to {limit - num_prompt_tokens} more need {needed} KV cache "
                f"blocks, and there are {self._kv.pool.num_usable}; lower max_tokens, send a shorter prompt or give "
                "the KV cache more memory (--kv-cache-memory or --gpu-memory-utilization)"
            )
        return ""

    def find_sequences(self, request_ids: Iterable[str]) -> list[LiveSequence]:
        """The live sequences of these requests."""
        return [self._by_id[request_id] for request_id in request_ids if request_id in self._by_id]

    def count_start(self, sequence: LiveSequence, num_cached_tokens: int) -> None:
        """Count the tokens that a sequence found in the prefix cache at its first start."""
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_cached_tokens
            self.totals.prefix_queries += len(sequence.tokens)
            self.totals.prefix_hits += num_cached_tokens

    def take_result(self, sequence: LiveSequence, result: SequenceResult) -> SequenceOutput:
        """Append what a step sampled to a live sequence; returns the output for the front."""
        is_first = sequence.num_output_tokens == 0
        if is_first:
            self.totals.prompt_tokens += len(sequence.tokens)
        count, reason = sequence.append_tokens(result.token_ids)
        stop_token_id = sequence.tokens[-1] if reason == "stop" else None
        if reason == "length" and sequence.awaits_mask:
            reason = None  # its grammar may be at its end, too
        if result.finished and count == len(result.token_ids):
            reason = "stop"
        self.totals.generation_tokens += count
        if reason is not None:
            del self._by_id[sequence.request.request_id]
        return SequenceOutput(
            sequence.request.request_id,
            result.token_ids[:count],
            result.logprobs and result.logprobs[:count],
            result.digests and result.digests[:count],
            reason,
            stop_token_id,
            sequence.num_cached_tokens or 0,
            prompt_logprobs=sequence.report.logprobs if is_first and sequence.report is not None else None,
        )

    def finish_embedding(self, sequence: LiveSequence, embedding: bytes) -> SequenceOutput:
        """End a live sequence whose prompt was embedded, at its last position or at all; returns its only output."""
        self.totals.prompt_tokens += len(sequence.tokens)
        embedding = sequence.report.embedding if sequence.report else embedding
        return self.end_sequence(sequence, "stop", embedding=embedding)

    def finish_sequence(self, sequence: LiveSequence, reason: FinishReason, error: str = "") -> None:
        """End a live sequence without a result; `take_outputs` has its last output. `error`: why it is refused."""
        self._outputs.append(self.end_sequence(sequence, reason, error, refused=bool(error)))

    def take_outputs(self) -> list[SequenceOutput]:
        """The outputs of requests that ended without a result since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def end_sequence(
        self,
        sequence: LiveSequence,
        reason: FinishReason,
        error: str = "",
        *,
        refused: bool = False,
        embedding: bytes = b"",
    ) -> SequenceOutput:
        """End a live sequence; returns its last output, which has no token. See `SequenceOutput.refused`."""
        del self._by_id[sequence.request.request_id]
        return SequenceOutput(
            sequence.request.request_id,
            [],
            finish_reason=reason,
            num_cached_tokens=sequence.num_cached_tokens or 0,
            error=error,
            embedding=embedding,
            refused=refused,
        )
