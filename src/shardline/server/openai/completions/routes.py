"""POST /v1/completions: the continuation of a text or of token ids."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import Response

from shardline.server.documentation import json_answers
from shardline.server.json_body import StrictRoute
from shardline.server.openai.beams import search_beams
from shardline.server.openai.completions.request import CompletionRequest, prepare_completion
from shardline.server.openai.completions.writer import CompletionResponse, CompletionWriter
from shardline.server.openai.generation import Generation
from shardline.server.service import Service, new_id
from shardline.server.sse import EventStream


def completion_routes(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/completions", responses=json_answers(CompletionResponse, streams=True))
    async def create_completion(body: CompletionRequest) -> Response:
        """Continue a text. With `stream`, the answer is sent as server-sent events."""
        completion = await prepare_completion(service, body)
        response_id = new_id("cmpl-")
        writer = CompletionWriter(service, body, response_id, completion.echoes)
        if body.use_beam_search:
            found = await search_beams(
                service,
                body,
                completion.prompts,
                completion.params,
                request_id=response_id,
                prompt_param="prompt",
                has_form=bool(completion.grammar),
            )
            return Response(writer.write_whole(found), headers=body.ignored_headers, media_type="application/json")
        generation = await Generation.start(
            service,
            completion.prompts,
            completion.params,
            request_id=response_id,
            prompt_param="prompt",
            **body.queueing,
            grammar=completion.grammar,
        )
        if body.stream:
            return EventStream(writer.write_chunks(generation), generation, body.ignored_headers)
        async with generation:
            outputs = await generation.wait_finished()
            if writer.takes_long:
                whole = await asyncio.to_thread(writer.write_whole, outputs)
            else:
                whole = writer.write_whole(outputs)
            return Response(whole, headers=body.ignored_headers, media_type="application/json")

    return router
