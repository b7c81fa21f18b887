"""Chat messages to prompt text and token ids, with the model's jinja template in a sandbox.

A template comes with the weights and is not trusted: it must not reach Python, and must not exhaust time or memory.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from shardline.models.gguf.header import read_header
from shardline.models.gguf.names import is_gguf
from shardline.models.gguf.tokenizer import read_chat_templates as read_gguf_templates
from shardline.text.template_sandbox import MAX_RENDERED_CHARS, compile_templates, reads_variable
from shardline.text.tokenizer import Tokenizer
from shardline.text.tokenizer_files import read_chat_templates

Message = Mapping[str, Any]

MAX_RENDER_SECONDS = 10.0

MAX_ARGUMENT_CHARS = 4 << 20
MAX_ARGUMENT_VALUES = 131_072
"""The most values in the arguments of one tool call."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class ChatTemplate:
    """The template, or named templates, of one model.

    Args:
        templates: jinja source by name: "default" for plain chats, and optionally "tool_use" for chats with tools.
        special_tokens: variables such as bos_token and eos_token.

    Raises:
        ValueError: a template does not parse.
    """

    def __init__(self, templates: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        sources = {"default": templates} if isinstance(templates, str) else dict(templates)
        self._special_tokens = dict(special_tokens or {})
        self.sources = sources
        self._templates = compile_templates(sources)
        self.takes_tools = "tool_use" in sources or reads_variable(sources.values(), "tools")
        """Whether the template shows tools to the model."""

    @classmethod
    def from_folder(cls, folder: Path, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate | None:
        """The chat template in `folder`, or in a GGUF file. None: the model has no template.

        Raises:
            ValueError: a file is broken.
        """
        sources = read_gguf_templates(read_header(folder)) if is_gguf(folder) else read_chat_templates(folder)
        return cls(sources, special_tokens) if sources else None

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation. `render_and_encode` also encodes it.

        Args:
            messages: OpenAI chat messages; see `normalize_messages`.
            tools: OpenAI tool definitions.
            variables: other variables that the template reads, for example enable_thinking.

        Raises:
            ValueError: the messages are malformed, or the template refuses them; then the text is the template's.
        """
        values = {
            **self._special_tokens,
            **variables,
            "messages": normalize_messages(messages),
            "tools": [dict(tool) for tool in tools] if tools else None,
            "documents": variables.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._choose(has_tools=bool(tools))
        try:
            return _render_bounded(template, values)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error
        except (TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
            raise ValueError(f"the chat template failed on these messages: {error}") from error

    def _choose(self, has_tools: bool) -> jinja2.Template:
        name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ValueError(f"the model has no default chat template, only {', '.join(sorted(self._templates))}")
        return self._templates[name]


def render_and_encode(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_special_tokens: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
    special_tokens_in_content: bool = False,
) -> tuple[str, list[int]]:
    """The prompt of a conversation, as text and as token ids. It may take long: servers call it on a thread.

    The rendered text is encoded as a whole. If a message, a tool or a variable spells a special token such as
    <|assistant|>, this part stays text; only the template writes special tokens.

    Args:
        special_tokens_in_content: whether a special token that is spelled becomes that token, as in other engines.
        add_special_tokens: whether the tokenizer adds its special tokens; most templates contain them already.
        tools: as the other arguments, see `ChatTemplate.render`.
        max_tokens: the longest prompt that is encoded; a longer one is refused before, where possible.
        continue_final_message: whether the prompt ends within the last message, which the answer continues.

    Raises:
        ValueError: the messages are malformed, or the template refuses them.
    """
    generation = add_generation_prompt and not continue_final_message
    messages, variables = normalize_messages(messages), dict(variables or {})
    marked = None if special_tokens_in_content else tokenizer.special.mark([messages, tools, variables])
    if marked is not None:
        [messages, tools, variables], marks = marked
    rendered = template.render(messages, tools=tools, add_generation_prompt=generation, **variables)
    if marked is not None:
        rendered = marks.recover(rendered)
    if continue_final_message:
        rendered = _cut_after_content(rendered, messages[-1])
    text = rendered if marked is None else marks.resolve(rendered)
    if max_tokens is not None and tokenizer.exceeds(text, max_tokens):
        raise ValueError(
            f"the prompt has {len(text)} characters, which are more than {max_tokens} tokens, "
            "the model's maximum length"
        )
    if marked is None:
        return text, tokenizer.encode_text(text, add_special_tokens)
    return text, tokenizer.special.encode(rendered, marks, add_special_tokens)


def _cut_after_content(text: str, message: Message) -> str:
    """The prompt up to the end of its last message's content.

    Raises:
        ValueError: the template does not show the content as it is.
    """
    content = _text_content(message.get("content"), -1)
    shown = content.strip()
    place = text.rfind(shown)
    if not shown or place < 0:
        raise ValueError("the last message cannot be continued: the chat template does not show its content as it is")
    return text[: place + len(shown)] + content[len(content.rstrip()) :]


def normalize_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: the content is a string, the arguments of a tool call are an object.

    Text parts are joined with newlines; a content of None becomes an empty string.

    Raises:
        ValueError: there are no messages, one has no role, or a part is not text.
    """
    if not messages:
        raise ValueError("messages must not be empty")
    normal = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{index}] must be an object with a role")
        copy = dict(message)
        copy["content"] = _text_content(message.get("content"), index)
        if message.get("tool_calls"):
            copy["tool_calls"] = [_parsed_call(call) for call in message["tool_calls"]]
        normal.append(copy)
    return normal


def _text_content(content: Any, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(f"messages[{index}].content must be text or a list of text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"messages[{index}].content has a part of type {kind!r}; this model takes text only")
        texts.append(part["text"])
    return "\n".join(texts)


def _parsed_call(call: Any) -> Any:
    """The call with its arguments as an object, which templates print; OpenAI sends them as a JSON string."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    text = function["arguments"]
    # A comma or bracket precedes each value, and nothing else runs while the text is parsed.
    num_values = text.count(",") + text.count("[") + text.count("{")
    if len(text) > MAX_ARGUMENT_CHARS or num_values > MAX_ARGUMENT_VALUES:
        raise ValueError(
            f"the arguments of a tool call have more than {MAX_ARGUMENT_CHARS} characters or {MAX_ARGUMENT_VALUES} "
            "commas and brackets"
        )
    try:
        arguments = json.loads(text or "{}")
        if _SURROGATE.search(text):
            json.dumps(arguments, ensure_ascii=False).encode()  # half of a pair cannot be encoded
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _render_bounded(template: jinja2.Template, values: Mapping[str, Any]) -> str:
    deadline = time.monotonic() + MAX_RENDER_SECONDS
    pieces: list[str] = []
    size = 0
    for piece in template.generate(values):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_RENDERED_CHARS:
            raise ValueError(f"the chat template wrote more than {MAX_RENDERED_CHARS} characters")
        if time.monotonic() > deadline:
            raise ValueError(f"the chat template took more than {MAX_RENDER_SECONDS:.0f} s")
    return "".join(pieces)
