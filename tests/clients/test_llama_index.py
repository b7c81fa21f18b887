"""LlamaIndex, with its classes for servers that speak OpenAI's API."""

from __future__ import annotations

import openai
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import Field

from tests.clients.forms import ANSWER, QUESTION, Bounded, Person
from tests.e2e.serving import Server

MESSAGES = [ChatMessage(role="user", content=QUESTION)]


def connect(base_url: str, **arguments: object) -> OpenAILike:
    settings = {"temperature": 0, "max_tokens": 200, "max_retries": 0, "context_window": 2048, **arguments}
    return OpenAILike(model="demo", api_base=base_url, api_key="none", **settings)


@pytest.fixture
def llm(base_url: str) -> OpenAILike:
    return connect(base_url, is_chat_model=True, is_function_calling_model=True)


class Topic(Bounded):
    """What a module is for."""

    topic: str = Field(max_length=12)


def find_module(topic: str) -> str:
    """Find a module by what it does."""
    return f"os.path, {topic}"


def test_chat(llm: OpenAILike) -> None:
    whole = llm.chat(MESSAGES).message.content
    assert ANSWER in whole
    chunks = list(llm.stream_chat(MESSAGES))
    assert len(chunks) > 3
    assert "".join(chunk.delta or "" for chunk in chunks) == chunks[-1].message.content == whole


def test_completion(base_url: str) -> None:
    llm = connect(base_url, max_tokens=12)
    whole = llm.complete("os.path.join:").text
    assert whole
    assert [chunk.text for chunk in llm.stream_complete("os.path.join:")][-1] == whole


def test_tools(llm: OpenAILike) -> None:
    tool = FunctionTool.from_defaults(find_module, fn_schema=Topic)
    asked = {"user_msg": QUESTION, "tool_required": True}
    [call] = llm.get_tool_calls_from_response(llm.chat_with_tools([tool], **asked))
    assert call.tool_name == "find_module"
    assert isinstance(call.tool_kwargs["topic"], str)
    *_, last = llm.stream_chat_with_tools([tool], **asked)
    [streamed] = llm.get_tool_calls_from_response(last)
    assert streamed.tool_kwargs == call.tool_kwargs
    assert llm.predict_and_call([tool], **asked).response == f"os.path, {call.tool_kwargs['topic']}"


def test_structured_output(llm: OpenAILike) -> None:
    """By a tool, which is this class's default; its other way is not for openai 3."""
    assert isinstance(llm.structured_predict(Person, PromptTemplate(QUESTION)), Person)


def test_errors(base_url: str) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        connect(base_url, is_chat_model=True).chat(MESSAGES, temperature=-1)


def test_embeddings(pooling_server: Server) -> None:
    embedding = OpenAILikeEmbedding(model_name="demo", api_base=f"{pooling_server.url}/v1", api_key="none")
    vectors = embedding.get_text_embedding_batch(["os.path", "json"])
    assert len(vectors) == 2
    assert embedding.get_query_embedding("json") == pytest.approx(vectors[1], abs=1e-6)
