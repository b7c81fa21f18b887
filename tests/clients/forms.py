"""What the tests ask the clients for."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

QUESTION = "What does os.path.join do?"
ANSWER = "Join two or more pathname components"
"""How the demo model answers the question."""

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]


class Bounded(BaseModel):
    """A form that has nothing but its fields, so that a small model comes to an end."""

    model_config = ConfigDict(extra="forbid")


class Person(Bounded):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)


class Verdict(Bounded):
    """A form without bounds, which some clients leave out of the schemas that they send."""

    kind: Literal["function", "class", "module"]
    sure: bool


FIND: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find_module",
        "description": "Find a module by what it does.",
        "parameters": {
            "type": "object",
            "properties": {"topic": {"type": "string", "maxLength": 12}},
            "required": ["topic"],
            "additionalProperties": False,
        },
    },
}
