"""POST /v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from shardline.server.errors import ERROR_RESPONSES, bad_request
from shardline.server.in_flight import EventStream, make_event
from shardline.server.openai.generation import Delta, Generation, SentChoice
from shardline.server.openai.logprobs import ChatLogprobs, TokenPieces, chat_logprobs
from shardline.server.openai.protocol import RequestModel, SamplingFields, refuse_if
from shardline.server.openai.strict_json import StrictRoute
from shardline.server.openai.usage import Usage, usage_of
from shardline.server.service import Service, new_id
from shardline.types import RequestOutput


class ContentPart(RequestModel):
    """A part of a message. Only text is supported; other types are refused."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


class ChatMessage(RequestModel):
    """A message of the conversation. It may have all fields of an answer, so that clients can send answers back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it. They do not know the role "developer", so it becomes "system"."""
        message = self.model_dump(exclude_none=True)
        if self.role == "developer":
            message["role"] = "system"
        return message


Messages = Annotated[list[ChatMessage], Field(min_length=1)]


class ConversationFields(RequestModel):
    """The fields that control how messages become a prompt."""

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None

    async def encode_messages(
        self, service: Service, messages: Sequence[ChatMessage], add_special_tokens: bool
    ) -> list[int]:
        """The prompt ids of `messages`.

        Raises:
            ApiError: 400, a field is not supported, or the model's template refuses the messages.
        """
        self._check_options()
        _check_messages(messages)
        return await service.encode_chat(
            [message.for_template() for message in messages],
            add_special_tokens=add_special_tokens,
            add_generation_prompt=self.add_generation_prompt is not False,
            variables=self.chat_template_kwargs or {},
        )

    def _check_options(self) -> None:
        refuse_if(
            bool(self.tools) and self.tool_choice != "none",
            "tools",
            "Tool calls are not supported: leave out 'tools', or set 'tool_choice' to 'none'.",
        )
        refuse_if(
            self.tool_choice not in (None, "none", "auto"),
            "tool_choice",
            "Tool calls are not supported: leave out 'tool_choice', or set it to 'none'.",
        )
        refuse_if(
            bool(self.continue_final_message),
            "continue_final_message",
            "'continue_final_message' is not supported: send the rendered prompt to /v1/completions.",
        )
        reserved = {"messages", "tools", "add_generation_prompt"} & (self.chat_template_kwargs or {}).keys()
        if reserved:
            raise bad_request(
                f"'chat_template_kwargs' must not set '{sorted(reserved)[0]}'; there is a field of that name.",
                "chat_template_kwargs",
            )


def _check_messages(messages: Sequence[ChatMessage]) -> None:
    for index, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            name = f"messages[{index}].content"
            raise bad_request(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
        for part in message.content if isinstance(message.content, list) else ():
            if part.type != "text" or part.text is None:
                raise bad_request(
                    f"messages[{index}] has a content part of type '{part.type}'; this model takes text only.",
                    "messages",
                )


class ResponseFormat(RequestModel):
    """The required format of the answer."""

    type: str
    json_schema: dict[str, Any] | None = None


class ChatRequest(ConversationFields, SamplingFields):
    """The body of POST /v1/chat/completions. The fields of the last block are accepted, but have no effect."""

    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    modalities: list[str] | None = None
    functions: list[dict[str, Any]] | None = None
    audio: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None

    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    prediction: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    def check(self) -> None:
        """Check the fields together.

        Raises:
            ApiError: 400, the fields contradict each other or ask for something unsupported.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request(
                "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.", "top_logprobs"
            )
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise bad_request("Set 'max_completion_tokens' or 'max_tokens', not both.", "max_tokens")
        form = self.response_format
        refuse_if(
            form is not None and form.type != "text",
            "response_format",
            f"'response_format' of type '{form.type if form else ''}' is not supported; use 'text'.",
        )
        refuse_if(self.modalities not in (None, ["text"]), "modalities", "Only the modality 'text' is supported.")
        refuse_if(self.audio is not None, "audio", "Audio is not supported.")
        refuse_if(bool(self.functions), "functions", "Function calls are not supported.")
        refuse_if(self.web_search_options is not None, "web_search_options", "Web search is not supported.")

    @property
    def token_limit(self) -> int | None:
        """Maximal number of tokens to generate. None: up to the model's maximum length."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class AssistantMessage(msgspec.Struct, kw_only=True, frozen=True):
    """The message of a whole answer."""

    role: str = "assistant"
    content: str
    refusal: None = None


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to the message."""

    role: str | None = None
    content: str | None = None


class ChatChoice(msgspec.Struct, kw_only=True, frozen=True):
    """One choice: `message` in a whole answer, `delta` in a chunk. The last two fields appear only on request."""

    index: int
    message: AssistantMessage | msgspec.UnsetType = msgspec.UNSET
    delta: ChatDelta | msgspec.UnsetType = msgspec.UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    logits_digests: list[str] | msgspec.UnsetType = msgspec.UNSET


class ChatResponse(msgspec.Struct, kw_only=True, frozen=True):
    """The whole answer, or a chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[ChatChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatWriter:
    """Writes the answer to one request, as a whole or in chunks."""

    def __init__(self, service: Service, body: ChatRequest, response_id: str) -> None:
        self._body = body
        self._options = body.check_stream()
        self._id = response_id
        self._created = int(time.time())
        self._model = service.model_names[0]
        self._fingerprint = service.llm.fingerprint
        self._with_ids = bool(body.return_token_ids)
        self._tokens_matter = bool(body.logprobs or body.return_token_ids or body.logits_digest)
        self._tokenizer = service.llm.tokenizer

    @cached_property
    def _pieces(self) -> TokenPieces:
        return TokenPieces(self._tokenizer)

    def write_whole(self, output: RequestOutput) -> bytes:
        """The JSON of the whole answer."""
        choices = []
        for choice in output.outputs:
            delta = SentChoice().take_delta(choice, tokens_matter=True)
            assert delta is not None
            message = AssistantMessage(content=delta.text)
            ending = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            choices.append(self._make_choice(choice.index, delta, message=message, **ending))
        prompt_ids = output.prompt_token_ids if self._with_ids else msgspec.UNSET
        return self._encode_response("chat.completion", choices, usage_of([output]), prompt_ids)

    async def write_chunks(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The events of a stream: for each choice its role, then pieces of its content, then its finish reason."""
        sent = [SentChoice() for _ in range(self._body.n or 1)]
        prompt_ids = generation.outputs[0].prompt_token_ids if self._with_ids else msgspec.UNSET
        yield b"".join(
            self._write_chunk(generation, ChatChoice(index=index, delta=ChatDelta("assistant", "")), prompt_ids)
            for index in range(len(sent))
        )
        async for _, output in generation.updates():
            events = []
            for choice in output.outputs:
                delta = sent[choice.index].take_delta(choice, tokens_matter=self._tokens_matter)
                if delta is not None:
                    events += [self._write_chunk(generation, part) for part in self._split_delta(choice.index, delta)]
            if events:
                yield b"".join(events)
        if self._options.include_usage:
            yield make_event(self._encode_response("chat.completion.chunk", [], usage_of(generation.outputs)))

    def _split_delta(self, index: int, delta: Delta) -> list[ChatChoice]:
        """A chunk with the new content, if there is any, and a chunk with the finish reason, if it ended."""
        parts = []
        if delta.text or (self._tokens_matter and delta.token_ids):
            parts.append(self._make_choice(index, delta, delta=ChatDelta(content=delta.text)))
        if delta.finish_reason is not None:
            parts.append(
                ChatChoice(
                    index=index, delta=ChatDelta(), finish_reason=delta.finish_reason, stop_reason=delta.stop_reason
                )
            )
        return parts

    def _make_choice(self, index: int, new: Delta, **fields: Any) -> ChatChoice:
        """A choice with the new tokens and these other fields."""
        return ChatChoice(
            index=index,
            logprobs=None if new.logprobs is None else chat_logprobs(self._pieces, new.token_ids, new.logprobs),
            token_ids=new.token_ids if self._with_ids else msgspec.UNSET,
            logits_digests=msgspec.UNSET if new.digests is None else new.digests,
            **fields,
        )

    def _write_chunk(
        self, generation: Generation, choice: ChatChoice, prompt_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    ) -> bytes:
        usage: Usage | msgspec.UnsetType | None = None if self._options.include_usage else msgspec.UNSET
        if self._options.continuous_usage_stats:
            usage = usage_of(generation.outputs)
        return make_event(self._encode_response("chat.completion.chunk", [choice], usage, prompt_ids))

    def _encode_response(
        self,
        kind: str,
        choices: Sequence[ChatChoice],
        usage: Usage | msgspec.UnsetType | None,
        prompt_ids: list[int] | msgspec.UnsetType = msgspec.UNSET,
    ) -> bytes:
        return msgspec.json.encode(
            ChatResponse(
                id=self._id,
                object=kind,
                created=self._created,
                model=self._model,
                system_fingerprint=self._fingerprint,
                choices=choices,
                usage=usage,
                prompt_token_ids=prompt_ids,
            )
        )


def chat_routes(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/chat/completions", responses=ERROR_RESPONSES)
    async def create_chat_completion(body: ChatRequest) -> Response:
        """Answer a conversation. With `stream`, the answer is sent as server-sent events."""
        service.require_model(body.model)
        body.check()
        params = body.sampling_params(
            max_tokens=body.token_limit, logprobs=(body.top_logprobs or 0) if body.logprobs else None
        )
        response_id = new_id("chatcmpl")
        writer = ChatWriter(service, body, response_id)
        prompt = await body.encode_messages(service, body.messages, add_special_tokens=bool(body.add_special_tokens))
        generation = await Generation.start(
            service,
            [prompt],
            params,
            request_id=response_id,
            prompt_param="messages",
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
        )
        if body.stream:
            return EventStream(writer.write_chunks(generation), generation)
        async with generation:
            [output] = await generation.wait_finished()
            return Response(writer.write_whole(output), media_type="application/json")

    return router
