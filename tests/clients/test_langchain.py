"""LangChain's chat model and embeddings for OpenAI."""

from __future__ import annotations

import pytest
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import Field

from tests.clients.forms import ANSWER, QUESTION, Bounded, Person
from tests.e2e.serving import Server


class find_module(Bounded):
    """Find a module by what it does."""

    topic: str = Field(max_length=12)


@pytest.fixture
def chat(base_url: str) -> ChatOpenAI:
    return ChatOpenAI(base_url=base_url, api_key="none", model="demo", temperature=0, max_tokens=200, max_retries=0)


def test_chat(chat: ChatOpenAI) -> None:
    whole = chat.invoke(QUESTION)
    assert ANSWER in whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    chunks = list(chat.stream(QUESTION))
    assert len(chunks) > 3
    assert "".join(chunk.content for chunk in chunks) == whole.content


def test_bind_tools(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([find_module], tool_choice="required", parallel_tool_calls=False)
    message = bound.invoke(QUESTION)
    [call] = message.tool_calls
    assert call["name"] == "find_module"
    assert isinstance(call["args"]["topic"], str)
    streamed = None
    for chunk in bound.stream(QUESTION):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert [one["args"] for one in streamed.tool_calls] == [one["args"] for one in message.tool_calls]
    assert len(chat.bind_tools([find_module], tool_choice="find_module").invoke(QUESTION).tool_calls) == 1


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: ChatOpenAI, method: str) -> None:
    assert isinstance(chat.with_structured_output(Person, method=method).invoke(QUESTION), Person)


def test_responses_api(base_url: str) -> None:
    chat = ChatOpenAI(base_url=base_url, api_key="none", model="demo", temperature=0, use_responses_api=True)
    assert ANSWER in chat.invoke(QUESTION).text
    assert ANSWER in "".join(chunk.text for chunk in chat.stream(QUESTION))


def test_embeddings(pooling_server: Server) -> None:
    embeddings = OpenAIEmbeddings(
        base_url=f"{pooling_server.url}/v1", api_key="none", model="demo", check_embedding_ctx_length=False
    )
    vectors = embeddings.embed_documents(["os.path", "json"])
    assert len(vectors) == 2
    assert embeddings.embed_query("json") == pytest.approx(vectors[1], abs=1e-6)
