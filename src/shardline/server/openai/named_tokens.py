"""How likely the next token after a prompt is each of some that are named: a request for one token."""

from __future__ import annotations

from collections.abc import Sequence

from shardline.api.logprob_counts import MAX_NAMED_LOGPROBS
from shardline.api.outputs import RequestOutput
from shardline.api.prompts import EncodedPrompt
from shardline.sampling_params import SamplingParams
from shardline.server.openai.generation import Generation, Prepared
from shardline.server.openai.whole_answer import wait_finished
from shardline.server.service import Service

MAX_NAMED = MAX_NAMED_LOGPROBS
"""The most tokens that one request may name."""


async def score_named(
    service: Service,
    prompts: Sequence[list[int]],
    named: Sequence[Sequence[int]],
    *,
    request_id: str,
    param: str,
    priority: int | None = None,
    cache_salt: str | None,
    model: str | None,
) -> list[RequestOutput]:
    """For each prompt and the tokens that are `named` behind it, an output which `named_logprobs` reads.

    Nothing is drawn, and no mark changes the logits. `param` is the field of the request that has the prompts.

    Raises:
        ApiError: see `Generation.start`.
    """
    own = [SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=ids, watermarking=False) for ids in named]
    generation = await Generation.start(
        service,
        Prepared(prompts=list(map(EncodedPrompt, prompts)), params=own[0], own_params=own, param=param),
        request_id,
        priority=priority or 0,
        cache_salt=cache_salt or "",
        model=model,
    )
    async with generation:
        return await wait_finished(generation)


def named_logprobs(output: RequestOutput) -> dict[int, float]:
    """The log probabilities of the named tokens as the next one; they count all tokens.

    The likeliest token is there, too, since it is the output.
    """
    entries = output.outputs[0].token_logprobs
    assert entries, "a finished output has them if they were asked for"
    return dict(zip(entries[0].top_ids, entries[0].top_logprobs, strict=True))
