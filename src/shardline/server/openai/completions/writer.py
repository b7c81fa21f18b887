"""Writes completions, as a whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec

from shardline.api.logprobs import Logprob
from shardline.api.outputs import CompletionOutput, RequestOutput
from shardline.messages.request import TokenLogprobs
from shardline.receipts.receipt import Receipt
from shardline.server.openai.answer_parts import LOWEST_LOGPROB, TokenPiece, TokenPieces, Usage, usage_of
from shardline.server.openai.completions.request import CompletionRequest
from shardline.server.openai.generation import Generation, SentChoice
from shardline.server.request_metrics import answer_metrics
from shardline.server.service import Service
from shardline.server.sse import Events, make_event


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """The `logprobs` of a completion choice: four lists with one entry for each token. The prompt's first token has no
    log probability."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionLogprobsWriter:
    """Writes the logprobs of one choice in several parts.

    Args:
        offset: number of characters before the first token: the length of an echoed prompt.
    """

    def __init__(self, pieces: TokenPieces, offset: int = 0) -> None:
        self._pieces = pieces
        self._offset = offset

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """The logprobs of the next tokens. The chosen token is the first of the top ones."""
        written = CompletionLogprobs([], [], [], [])
        for token_id, chosen in zip(token_ids, logprobs, strict=True):
            piece = self._pieces[token_id]
            continues = bool(piece.bytes) and piece.bytes[0] & 0xC0 == 0x80
            written.text_offset.append(max(0, self._offset - continues))
            written.tokens.append(piece.text)
            written.token_logprobs.append(None if chosen is None else max(chosen.logprob, LOWEST_LOGPROB))
            written.top_logprobs.append(None if chosen is None else self._top(piece, chosen))
            self._offset += piece.num_chars
        return written

    def write_prompt(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """The logprobs of an echoed prompt, before all others; `logprobs` begins with its second token."""
        # Tokens that the text does not show, such as the first one of many models, lie before it.
        self._offset -= sum(self._pieces[token_id].num_chars for token_id in token_ids)
        return self.write(token_ids, [None, *logprobs])

    def _top(self, piece: TokenPiece, chosen: TokenLogprobs) -> dict[str, float]:
        top = {piece.text: max(chosen.logprob, LOWEST_LOGPROB)}
        for token_id, value in zip(chosen.top_ids, chosen.top_logprobs, strict=True):
            # Two ids may have the same text; the chosen one keeps it, else the more likely one.
            top.setdefault(self._pieces[token_id].text, max(value, LOWEST_LOGPROB))
        return top


def join_logprobs(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """The logprobs of two parts of a choice."""
    return CompletionLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )


class CompletionChoice(msgspec.Struct, kw_only=True, frozen=True):
    """One choice; in a chunk, what is new in it, without the last field. The digests are there only on request."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logits_digests: list[str] | msgspec.UnsetType = msgspec.UNSET
    receipt: Receipt | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[dict[int, Logprob] | None] | msgspec.UnsetType | None = msgspec.UNSET


class CompletionResponse(msgspec.Struct, kw_only=True, frozen=True):
    """The whole answer, or a chunk of a stream: both have the same shape."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    service_tier: msgspec.UnsetType | None = msgspec.UNSET
    kv_transfer_params: msgspec.UnsetType | None = msgspec.UNSET
    metrics: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class CompletionWriter:
    """Writes the answer to one request, as a whole or in chunks."""

    def __init__(self, service: Service, body: CompletionRequest, response_id: str, texts: Sequence[str]) -> None:
        self._body = body
        self._options = body.check_stream(with_usage=service.config.enable_force_include_usage)
        self._id, self._created = body.origin(response_id)
        self._model = service.name_of(body.model)
        self._fingerprint = service.llm.model.fingerprint
        self.takes_long = body.logprobs is not None or body.num_prompt_logprobs is not None
        """Whether a whole answer must not be written on the event loop."""
        self._choices_per_prompt = body.n or 1
        self._texts = texts
        """For each prompt, the text to repeat before the output; empty without `echo`."""
        self._tokenizer = service.llm.model.tokenizer
        asked = body.return_tokens_as_token_ids
        self._tokens_as_ids = service.config.return_tokens_as_token_ids if asked is None else asked

    @cached_property
    def _pieces(self) -> TokenPieces:
        return TokenPieces(self._tokenizer, as_ids=self._tokens_as_ids)

    def write_whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The JSON of the whole answer."""
        if self._body.generates_nothing:
            outputs = [_without_tokens(output) for output in outputs]
        choices = []
        for prompt_index, output in enumerate(outputs):
            ranked = _best_choices(output, self._choices_per_prompt) if self._body.ranks_choices else output.outputs
            for choice in ranked:
                delta = SentChoice().take_delta(choice, tokens_matter=True)
                assert delta is not None
                if self._body.logprobs is None:
                    delta.token_logprobs = None
                writer = self._logprobs_writer(prompt_index)
                whole = self._write_choice(prompt_index, output, choice, delta, writer, first=True)
                scores = None if self._body.prompt_logprobs is None else output.prompt_logprobs
                choices.append(msgspec.structs.replace(whole, prompt_logprobs=scores))
        return self._encode_response(choices, self._usage(outputs), outputs, service_tier=None, kv_transfer_params=None)

    def write_chunks(self, generation: Generation) -> Events:
        """The events of a stream."""
        body = self._body
        tokens_matter = body.logprobs is not None or bool(body.return_token_ids or body.logits_digest)
        choices = range(self._choices_per_prompt)
        sent = [[SentChoice() for _ in choices] for _ in self._texts]
        writers = [[self._logprobs_writer(prompt_index) for _ in choices] for prompt_index in range(len(self._texts))]
        no_usage = None if self._options.include_usage else msgspec.UNSET
        events: list[bytes] = []
        while (update := (yield b"".join(events))) is not None:
            prompt_index, output = update
            if body.generates_nothing:
                output = _without_tokens(output)
            events = []
            for choice in output.outputs:
                sent_choice = sent[prompt_index][choice.index]
                first = sent_choice.num_tokens == 0
                delta = sent_choice.take_delta(choice, tokens_matter=tokens_matter)
                if delta is None:
                    continue
                writer = writers[prompt_index][choice.index]
                chunk = self._write_choice(prompt_index, output, choice, delta, writer, first=first)
                usage = self._usage(generation.outputs) if self._options.counts_always else no_usage
                events.append(make_event(self._encode_response([chunk], usage)))
        yield self._write_ending(generation.outputs)

    def _write_ending(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The chunk with the usage and the metrics, if the request asked for either."""
        if not (self._options.include_usage or self._body.return_metrics):
            return b""
        usage = self._usage(outputs) if self._options.include_usage else msgspec.UNSET
        return make_event(self._encode_response([], usage, outputs))

    def _usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        return usage_of([_without_tokens(output) for output in outputs] if self._body.generates_nothing else outputs)

    def _logprobs_writer(self, prompt_index: int) -> CompletionLogprobsWriter:
        return CompletionLogprobsWriter(self._pieces, len(self._texts[prompt_index]))

    def _write_choice(
        self,
        prompt_index: int,
        output: RequestOutput,
        choice: CompletionOutput,
        delta: CompletionOutput,
        writer: CompletionLogprobsWriter,
        *,
        first: bool,
    ) -> CompletionChoice:
        body = self._body
        with_ids = bool(body.return_token_ids)
        logprobs = None if delta.token_logprobs is None else writer.write(delta.token_ids, delta.token_logprobs)
        if first and body.echo and body.logprobs is not None:
            scores = output.prompt_token_logprobs or []
            count = None if body.logprobs == -1 else body.logprobs
            own = [TokenLogprobs(s.logprob, s.rank, s.top_ids[:count], s.top_logprobs[:count]) for s in scores]
            before = CompletionLogprobsWriter(self._pieces, len(self._texts[prompt_index]))
            prompt = before.write_prompt(output.prompt_token_ids, own)
            logprobs = prompt if logprobs is None else join_logprobs(prompt, logprobs)
        return CompletionChoice(
            index=prompt_index * self._choices_per_prompt + choice.index,
            text=self._texts[prompt_index] + delta.text if first else delta.text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if with_ids else None,
            prompt_token_ids=output.prompt_token_ids if with_ids and first else None,
            logits_digests=delta.digests if body.logits_digest and delta.digests is not None else msgspec.UNSET,
            receipt=delta.receipt or msgspec.UNSET,
        )

    def _encode_response(
        self,
        choices: Sequence[CompletionChoice],
        usage: Usage | msgspec.UnsetType | None,
        finished: Sequence[RequestOutput] = (),
        **fields: Any,
    ) -> bytes:
        return msgspec.json.encode(
            CompletionResponse(
                id=self._id,
                created=self._created,
                model=self._model,
                system_fingerprint=self._fingerprint,
                choices=choices,
                usage=usage,
                metrics=answer_metrics(finished) if self._body.return_metrics and finished else msgspec.UNSET,
                **fields,
            )
        )


def _without_tokens(output: RequestOutput) -> RequestOutput:
    """The output as if nothing had been generated."""
    ended = [
        CompletionOutput(index=choice.index, finish_reason=choice.finish_reason and "length")
        for choice in output.outputs
    ]
    return msgspec.structs.replace(output, outputs=ended)


def _best_choices(output: RequestOutput, count: int) -> list[CompletionOutput]:
    """The choices with the largest mean log probability of their tokens, best first, numbered anew."""

    def score(choice: CompletionOutput) -> float:
        return (choice.cumulative_logprob or 0.0) / max(1, len(choice.token_ids))

    best = sorted(output.outputs, key=score, reverse=True)[:count]
    return [msgspec.structs.replace(choice, index=index) for index, choice in enumerate(best)]
