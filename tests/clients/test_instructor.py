"""instructor: pydantic models as answers, in each of the ways that it asks for them."""

from __future__ import annotations

import anthropic
import instructor
import openai
import pytest

from tests.clients.forms import MESSAGES, Person, Verdict
from tests.e2e.serving import Server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client()


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_chat(client: openai.OpenAI, mode: str) -> None:
    asking = instructor.from_openai(client, mode=instructor.Mode[mode], model="demo", temperature=0, max_tokens=200)
    person, completion = asking.create_with_completion(messages=MESSAGES, response_model=Person, max_retries=0)
    assert isinstance(person, Person)
    assert completion.usage.completion_tokens > 0


def test_partial(client: openai.OpenAI) -> None:
    asking = instructor.from_openai(client, model="demo", temperature=0, max_tokens=200)
    parts = list(asking.create_partial(messages=MESSAGES, response_model=Person, max_retries=0))
    assert len(parts) > 3
    Person.model_validate(parts[-1].model_dump())


def test_responses(client: openai.OpenAI) -> None:
    asking = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS, model="demo")
    asked = {"messages": MESSAGES, "temperature": 0, "max_output_tokens": 200, "max_retries": 0}
    assert isinstance(asking.create(response_model=Person, **asked), Person)


def test_anthropic(server: Server) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    asking = instructor.from_anthropic(client, model="demo", max_tokens=200)
    assert isinstance(asking.create(messages=MESSAGES, response_model=Verdict, max_retries=0), Verdict)
