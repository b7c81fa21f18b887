"""The back ends of `shardline chat`: an engine started by this process, or a server."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any, Protocol

from shardline import env
from shardline.api.async_llm import AsyncLLM
from shardline.api.streams import RequestStream
from shardline.benchmark.http_client import split_url
from shardline.config.engine import EngineConfig
from shardline.sampling_params import SamplingParams
from shardline.text.chat_template import Conversation, render_and_encode

BEGIN_THINKING, END_THINKING = "<think>\n", "\n</think>\n"
"""What reasoning is shown between, if a server sends it apart from the answer."""

_CONNECT_SECONDS = 600.0
"""Longest wait for the next byte from a server."""


class ChatBackend(Protocol):
    model: str

    def reply(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """The answer in pieces; closing the iterator early aborts the request.

        Raises:
            ValueError: the conversation cannot be answered.
            RuntimeError: the engine or the server failed.
        """

    def close(self) -> None:
        """Release the model."""


class LocalBackend:
    """An AsyncLLM, whose event loop runs only during an answer.

    Raises:
        ValueError: the configuration is at fault, or the model has no chat template.
        RuntimeError: the engine failed.
    """

    def __init__(self, config: EngineConfig, params: SamplingParams, llm: AsyncLLM | None = None) -> None:
        self.model = config.model.model
        self._params = params
        self._loop = asyncio.new_event_loop()
        self._llm = llm or AsyncLLM(config)
        try:
            self._loop.run_until_complete(self._llm.wait_ready())
            if self._llm.model.chat_template is None or self._llm.model.tokenizer is None:
                raise ValueError(f"{self.model} has no chat template")
        except BaseException:
            self.close()
            raise

    def reply(self, messages: list[dict[str, str]]) -> Iterator[str]:
        template, tokenizer = self._llm.model.chat_template, self._llm.model.tokenizer
        assert template is not None
        assert tokenizer is not None
        _, ids = render_and_encode(template, tokenizer, Conversation(messages))
        stream = self._loop.run_until_complete(self._llm.submit({"prompt_token_ids": ids}, self._params))
        try:
            yield from self._read_pieces(stream)
        finally:
            self._loop.run_until_complete(stream.aclose())

    def _read_pieces(self, stream: RequestStream) -> Iterator[str]:
        shown = 0
        while True:
            try:
                output = self._loop.run_until_complete(stream.__anext__())
            except StopAsyncIteration:
                return
            choice = output.outputs[0]
            if choice.finish_reason == "error":
                raise RuntimeError(choice.error or "the engine ended the answer without saying why")
            yield choice.text[shown:]
            shown = len(choice.text)

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.run_until_complete(self._llm.close())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()


class RemoteBackend:
    """An OpenAI-compatible server. `model` None: the first model in the server's list.

    Raises:
        ValueError: the URL is invalid, or the server refused the request.
        RuntimeError: the server cannot be reached.
    """

    def __init__(self, url: str, *, api_key: str | None = None, model: str | None = None, **options: Any) -> None:
        split_url(url)  # urllib would take an impossible port modulo 65,536
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._key = api_key or env.api_key() or env.openai_api_key()
        self._options = {name: value for name, value in options.items() if value is not None}
        self.model = model or self._first_model()

    def reply(self, messages: list[dict[str, str]]) -> Iterator[str]:
        thinks = False
        for choice in self._stream("/chat/completions", messages=messages):
            delta = choice.get("delta", {})
            thought = delta.get("reasoning") or delta.get("reasoning_content")
            content = str(delta.get("content") or "")
            if thought:
                yield f"{'' if thinks else BEGIN_THINKING}{thought}"
                thinks = True
            if content or not thought:
                yield f"{END_THINKING if thinks and content else ''}{content}"
                thinks = thinks and not content

    def complete(self, prompt: str) -> Iterator[str]:
        """How a text goes on, in pieces; see `ChatBackend.reply`."""
        for choice in self._stream("/completions", prompt=prompt):
            yield str(choice.get("text") or "")

    def _stream(self, path: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """The first choice of each event."""
        body = {"model": self.model, **fields, "stream": True, **self._options}
        with self._open_url(path, body) as response:
            try:
                for line in response:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[len(b"data:") :].strip()
                    if data == b"[DONE]":
                        return
                    yield _first_choice(json.loads(data))
            except (OSError, HTTPException) as error:
                raise RuntimeError(f"the server closed the connection: {_reason(error)}") from error

    def close(self) -> None:
        """Does nothing: no connection stays open between answers."""

    def _first_model(self) -> str:
        with self._open_url("/models") as response:
            models = json.load(response).get("data") or []
        if not models:
            raise ValueError(f"{self._base} serves no model")
        return str(models[0]["id"])

    def _open_url(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return open_url(self._base, path, self._key, body)


def open_url(
    base: str, path: str, key: str | None, body: dict[str, Any] | None = None, timeout: float = _CONNECT_SECONDS
) -> Any:
    """The answer of a server to GET, or to POST with a body.

    Raises:
        ValueError: the server refused the request.
        RuntimeError: the server cannot be reached, or has failed.
    """
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        return urllib.request.urlopen(urllib.request.Request(base + path, data, headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        kind = ValueError if error.code < 500 else RuntimeError
        raise kind(f"the server answered {error.code}: {_error_text(error.read())}") from error
    except (OSError, HTTPException) as error:
        raise RuntimeError(f"{base} cannot be reached: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Why a server did not answer, in words for people."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause) or type(cause).__name__


def _first_choice(event: dict[str, Any]) -> dict[str, Any]:
    if "error" in event:
        raise RuntimeError(_error_text(json.dumps(event).encode()))
    choice: dict[str, Any] = (event.get("choices") or [{}])[0]
    return choice


def _error_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
