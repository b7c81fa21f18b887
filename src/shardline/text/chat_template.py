"""Conversations to prompt text, with the model's jinja template, and to token ids: the text is encoded as a whole.

A template comes with the weights and is not trusted. It runs in processes of its own, see `text.template_service`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardline.sandbox.worker import WorkerEnded
from shardline.text.chat_messages import Message, normalize_messages
from shardline.text.model_files import read_chat_templates
from shardline.text.partial_prompt import cut_after_content, encode_around_gaps
from shardline.text.spelled_tokens import Marks
from shardline.text.template_jobs import JOB_ENCODER, MAX_RENDERED_CHARS, REFUSED, Render
from shardline.text.template_sandbox import compile_templates, explain_limit
from shardline.text.tokenizer import MAX_INLINE_CHARS, Tokenizer, check_text

MAX_RENDER_SECONDS = 2.0


@dataclass(frozen=True)
class Conversation:
    """What a chat template is given, and how its text becomes a prompt.

    `tools`: OpenAI tool definitions. `variables`: other variables of the template, such as enable_thinking.
    `template`: jinja source of a template for this conversation only; None: the model's.
    `continue_final_message`: the prompt ends within the last message, which the answer continues. `add_special_tokens`:
    the tokenizer adds its special tokens; most templates contain them already.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template: str | None = None
    gaps: Sequence[str] = ()
    """Texts in the messages that nobody could guess, in their order. Each becomes one negative id, -1, -2 and so on,
    where something else than tokens stands in the prompt."""


class ChatTemplate:
    """The template, or named templates, of one model. They run in processes that are kept for the next chats.

    Args:
        templates: jinja source by name: "default" for plain chats, and optionally "tool_use" for chats with tools.
        special_tokens: variables such as bos_token and eos_token.

    Raises:
        ValueError: a template does not parse, or compiling it hits a limit.
    """

    def __init__(self, templates: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        self.sources = {"default": templates} if isinstance(templates, str) else dict(templates)
        self.special_tokens = dict(special_tokens or {})
        self.content_as_parts = False
        """Whether the template gets contents as lists of parts, not as text."""
        self._pool, self.takes_tools = compile_templates(self.sources)
        """Whether the template shows tools to the model."""

    @classmethod
    def from_folder(cls, folder: Path, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate | None:
        """The chat template in `folder`, or in a GGUF file. None: the model has no template.

        Raises:
            ValueError: a file is broken.
        """
        sources = read_chat_templates(folder)
        return cls(sources, special_tokens) if sources else None

    def render(self, chat: Conversation) -> str:
        """The prompt text of a conversation. `render_and_encode` also encodes it.

        Raises:
            ValueError: the messages are malformed, the template hits a limit, or it refuses the messages; then the text
                is the template's.
        """
        try:
            return _read_answer(self._pool.run_blocking(self._encode_render(chat), MAX_RENDER_SECONDS))
        except WorkerEnded as ended:
            raise ValueError(f"the chat template failed: {explain_limit(ended, MAX_RENDER_SECONDS)}") from None

    async def render_async(self, chat: Conversation) -> str:
        """As `render`, without holding up the event loop. Chats do not wait for one another."""
        try:
            return _read_answer(await self._pool.run(self._encode_render(chat), MAX_RENDER_SECONDS))
        except WorkerEnded as ended:
            raise ValueError(f"the chat template failed: {explain_limit(ended, MAX_RENDER_SECONDS)}") from None

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    def _encode_render(self, chat: Conversation) -> bytes:
        name = "tool_use" if chat.tools and "tool_use" in self.sources else "default"
        if chat.template is not None:
            name = "request"
        elif name not in self.sources:
            others = f", only {', '.join(sorted(self.sources))}" if self.sources else ""
            raise ValueError(f"the model has no default chat template{others}")
        values = {
            **self.special_tokens,
            **chat.variables,
            "tools": list(chat.tools) if chat.tools else None,
            "documents": chat.variables.get("documents"),
            "add_generation_prompt": chat.add_generation_prompt and not chat.continue_final_message,
        }
        try:
            job = Render(name, chat.messages, values, MAX_RENDERED_CHARS, chat.template, self.content_as_parts)
            return JOB_ENCODER.encode(job)
        except UnicodeEncodeError as error:
            check_text(error.object)
            raise
        except (TypeError, RecursionError) as error:
            raise ValueError(f"messages, tools and variables of a chat must be JSON: {error}") from error


def _read_answer(answer: bytes) -> str:
    text = answer[1:].decode()
    if answer[:1] == REFUSED:
        raise ValueError(text)
    return text


class PromptTooLong(ValueError):
    """A rendered prompt certainly has more tokens than are encoded."""


def render_and_encode(
    template: ChatTemplate, tokenizer: Tokenizer, chat: Conversation, *, special_tokens_in_content: bool = False
) -> tuple[str, list[int]]:
    """The prompt of a conversation, as text and as token ids. It may take long: servers use `render_and_encode_async`.

    The rendered text is encoded as a whole. If a message, a tool or a variable spells a special token such as
    <|assistant|>, this part stays text; only the template writes special tokens. With `special_tokens_in_content`, it
    becomes that token, as in other engines.

    Raises:
        ValueError: the messages are malformed, or the template refuses them.
    """
    chat, marks = _mark(tokenizer, chat, special_tokens_in_content)
    return _encode(tokenizer, template.render(chat), chat, marks, None)


async def render_and_encode_async(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    chat: Conversation,
    *,
    max_tokens: int | None = None,
    special_tokens_in_content: bool = False,
) -> tuple[str, list[int]]:
    """As `render_and_encode`, without holding up the event loop.

    `max_tokens`: the longest prompt that is encoded; a longer one is refused before, where possible (PromptTooLong).
    """
    chat, marks = await asyncio.to_thread(_mark, tokenizer, chat, special_tokens_in_content)
    text = await template.render_async(chat)
    if marks is None and len(text) <= MAX_INLINE_CHARS:
        return _encode(tokenizer, text, chat, marks, max_tokens)
    return await asyncio.to_thread(_encode, tokenizer, text, chat, marks, max_tokens)


def _mark(
    tokenizer: Tokenizer, chat: Conversation, special_tokens_in_content: bool
) -> tuple[Conversation, Marks | None]:
    """The conversation with marks for special tokens; None: nobody has spelled one."""
    # Before the search: arguments of tool calls are JSON, in which a token can be spelled with escapes.
    chat = replace(chat, messages=normalize_messages(chat.messages))
    given = [chat.messages, chat.tools, dict(chat.variables)]
    if special_tokens_in_content or not tokenizer.special.may_occur_in(given):
        return chat, None
    [messages, tools, variables], marks = tokenizer.spelled.mark(given)
    return replace(chat, messages=messages, tools=tools, variables=variables), marks


def _encode(
    tokenizer: Tokenizer, rendered: str, chat: Conversation, marks: Marks | None, max_tokens: int | None
) -> tuple[str, list[int]]:
    """The prompt as text and as ids, from what the template has written."""
    if marks is not None:
        rendered = marks.recover(rendered)
    if chat.continue_final_message:
        rendered = cut_after_content(rendered, chat.messages[-1])
    text = rendered if marks is None else marks.resolve(rendered)
    if max_tokens is not None and tokenizer.exceeds(text, max_tokens):
        raise PromptTooLong(f"The prompt has {len(text)} characters, which are more than {max_tokens} tokens.")
    encode = tokenizer.encode_text if marks is None else partial(tokenizer.spelled.encode, marks)
    if chat.gaps:
        return encode_around_gaps(rendered, text, chat.gaps, encode, chat.add_special_tokens)
    return text, encode(rendered, chat.add_special_tokens)
