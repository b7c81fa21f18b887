"""Conversations to prompt text and token ids: the chat template writes the text, which is encoded as a whole."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from shardline.text.chat_messages import normalize_messages
from shardline.text.chat_template import ChatTemplate, Conversation
from shardline.text.partial_prompt import cut_after_content, encode_around_gaps
from shardline.text.spelled_tokens import Marks
from shardline.text.tokenizer import MAX_INLINE_CHARS, Tokenizer


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
