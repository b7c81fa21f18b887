"""Agents of pydantic-ai."""

from __future__ import annotations

import asyncio
from typing import Annotated

import pytest
from pydantic import Field
from pydantic_ai import Agent, Embedder, ModelSettings, NativeOutput, RunContext, ToolOutput
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.forms import ANSWER, QUESTION, Person
from tests.e2e.serving import Server

SETTINGS = ModelSettings(temperature=0, max_tokens=200)


@pytest.fixture
def provider(base_url: str) -> OpenAIProvider:
    return OpenAIProvider(base_url=base_url, api_key="none")


@pytest.fixture
def model(provider: OpenAIProvider) -> OpenAIChatModel:
    return OpenAIChatModel("demo", provider=provider)


async def streamed(agent: Agent) -> list[str]:
    """The pieces of an answer."""
    async with agent.run_stream(QUESTION) as run:
        return [delta async for delta in run.stream_text(delta=True, debounce_by=None)]


def test_text(model: OpenAIChatModel) -> None:
    agent = Agent(model, model_settings=SETTINGS)
    whole = agent.run_sync(QUESTION)
    assert ANSWER in whole.output
    assert whole.usage.output_tokens > 0
    deltas = asyncio.run(streamed(agent))
    assert len(deltas) > 3
    assert "".join(deltas) == whole.output
    assert agent.run_sync("And json.dumps?", message_history=whole.all_messages()).output


@pytest.mark.parametrize("output", [NativeOutput(Person, strict=True), ToolOutput(Person)], ids=["schema", "tool"])
def test_structured_output(model: OpenAIChatModel, output: NativeOutput | ToolOutput) -> None:
    assert isinstance(Agent(model, model_settings=SETTINGS, output_type=output).run_sync(QUESTION).output, Person)


def test_tools(model: OpenAIChatModel) -> None:
    topics = []

    def find_module(topic: Annotated[str, Field(max_length=12)]) -> str:
        """Find a module by what it does."""
        topics.append(topic)
        return "os.path"

    def settings(context: RunContext) -> ModelSettings:
        """First a call, then an answer."""
        return {
            **SETTINGS,
            "tool_choice": "required" if context.run_step == 1 else "none",
            "parallel_tool_calls": False,
        }

    run = Agent(model, tools=[find_module], model_settings=settings).run_sync(QUESTION)
    assert run.output
    [topic] = topics
    assert isinstance(topic, str)


def test_responses(provider: OpenAIProvider) -> None:
    agent = Agent(OpenAIResponsesModel("demo", provider=provider), model_settings=SETTINGS)
    assert ANSWER in agent.run_sync(QUESTION).output
    assert ANSWER in "".join(asyncio.run(streamed(agent)))


def test_errors(model: OpenAIChatModel) -> None:
    with pytest.raises(ModelHTTPError, match="temperature") as error:
        Agent(model, model_settings={"temperature": -1}).run_sync(QUESTION)
    assert error.value.status_code == 400


def test_embeddings(pooling_server: Server) -> None:
    provider = OpenAIProvider(base_url=f"{pooling_server.url}/v1", api_key="none")
    answer = Embedder(OpenAIEmbeddingModel("demo", provider=provider)).embed_documents_sync(["os.path", "json"])
    assert len(answer.embeddings) == 2
