"""Prompts that are not the whole text of a chat template: they end within the last message, or have gaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardline.text.chat_messages import Message, text_content


def encode_around_gaps(
    rendered: str, text: str, gaps: Sequence[str], encode: Callable[[str, bool], list[int]], add_special_tokens: bool
) -> tuple[str, list[int]]:
    """The prompt as text and as ids, encoded piece by piece: no token reaches over a gap, and each of them becomes a
    negative id. `text`: what the prompt says, without the marks that `rendered` may have.

    Raises:
        ValueError: the template does not show each gap once.
    """
    ids: list[int] = []
    for index, gap in enumerate(gaps):
        piece, found, rendered = rendered.partition(gap)
        if not found or gap in rendered:
            raise ValueError("the chat template must show each of prompt_embeds once, in the order of the messages")
        if piece:
            ids += encode(piece, add_special_tokens and index == 0)
        ids.append(-1 - index)
        text = text.replace(gap, "")
    if rendered:
        ids += encode(rendered, False)
    return text, ids


def cut_after_content(text: str, message: Message) -> str:
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
