"""Answers by beam search: the likeliest outputs instead of sampled ones."""

from __future__ import annotations

from collections.abc import Sequence

from shardline.api.beam_search import BeamSearchParams, search_async, step_params
from shardline.api.outputs import RequestOutput
from shardline.api.prompts import Prompt
from shardline.sampling_params import SamplingParams
from shardline.server.errors import answer_failed
from shardline.server.openai.engine_errors import as_api_error
from shardline.server.openai.protocol import SamplingFields, bad_parameter, refuse_if
from shardline.server.service import Service


async def search_beams(
    service: Service,
    body: SamplingFields,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    request_id: str,
    prompt_param: str,
    has_form: bool,
) -> list[RequestOutput]:
    """For each prompt its `n` likeliest outputs; `params`: what the request asks for otherwise, `has_form`: whether it
    asks for a form of the output.

    Raises:
        ApiError: 400, the request asks for something else besides; else as `Generation.start`.
    """
    param = "use_beam_search"
    refuse_if(bool(body.stream), "stream", "Streaming is not currently supported with beam search.")
    refuse_if(bool(body.logprob_token_ids), param, "'logprob_token_ids' is not supported with beam search.")
    refuse_if(bool(params.stop_strings or params.stop_token_ids), param, "'stop' is not supported with beam search.")
    refuse_if(has_form, param, "A form of the output, or tools, are not supported with beam search.")
    most = service.llm.model.max_model_len
    try:
        search = BeamSearchParams(
            beam_width=params.n,
            max_tokens=most if params.max_tokens is None else params.max_tokens,
            ignore_eos=params.ignore_eos,
            temperature=params.temperature,
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )
        step_params(search, 0, service.llm.model.builder.logprob_counts)
    except ValueError as error:
        raise bad_parameter(str(error).replace("beam_width", "n")) from error
    outputs = []
    for index, prompt in enumerate(prompts):
        try:
            outputs.append(
                await search_async(
                    service.llm,
                    prompt,
                    search,
                    request_id=f"{request_id}-{index}",
                    top_logprobs=params.logprobs,
                    priority=body.priority or 0,
                    cache_salt=body.cache_salt or "",
                    adapter=service.require_model(body.model),
                )
            )
        except Exception as error:
            answer = as_api_error(error, prompt_param)
            if answer is None and isinstance(error, RuntimeError):
                answer = answer_failed(str(error))
            if answer is None:
                raise
            raise answer from error
    return outputs
