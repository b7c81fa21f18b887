"""Conversations to prompt text and token ids: the chat template writes the text, which is encoded as a whole."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from shardline.text.chat_messages import Message, normalize_messages, text_content
from shardline.text.chat_template import ChatTemplate, Conversation
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
        rendered = _cut_after_content(rendered, chat.messages[-1])
    text = rendered if marks is None else marks.resolve(rendered)
    if max_tokens is not None and tokenizer.exceeds(text, max_tokens):
        raise PromptTooLong(f"The prompt has {len(text)} characters, which are more than {max_tokens} tokens.")
    if chat.gaps:
        return _encode_around_gaps(tokenizer, rendered, text, chat, marks)
    return text, _encode_text(tokenizer, rendered, marks, chat.add_special_tokens)


def _encode_text(tokenizer: Tokenizer, rendered: str, marks: Marks | None, add_special_tokens: bool) -> list[int]:
    if marks is None:
        return tokenizer.encode_text(rendered, add_special_tokens)
    return tokenizer.spelled.encode(rendered, marks, add_special_tokens)


def _encode_around_gaps(
    tokenizer: Tokenizer, rendered: str, text: str, chat: Conversation, marks: Marks | None
) -> tuple[str, list[int]]:
    """As `_encode`, piece by piece: no token reaches over a gap."""
    ids: list[int] = []
    for index, gap in enumerate(chat.gaps):
        piece, found, rendered = rendered.partition(gap)
        if not found or gap in rendered:
            raise ValueError("the chat template must show each of prompt_embeds once, in the order of the messages")
        if piece:
            ids += _encode_text(tokenizer, piece, marks, chat.add_special_tokens and index == 0)
        ids.append(-1 - index)
        text = text.replace(gap, "")
    if rendered:
        ids += _encode_text(tokenizer, rendered, marks, False)
    return text, ids


def _cut_after_content(text: str, message: Message) -> str:
    """The prompt up to the end of its last message's content.

    Raises:
        ValueError: the template does not show the content as it is.
    """
    content = text_content(message.get("content"), -1)
    shown = content.strip()
    place = text.rfind(shown)
    if not shown or place < 0:
        raise ValueError("the last message cannot be continued: the chat template does not show its content as it is")
    return text[: place + len(shown)] + content[len(content.rstrip()) :]
