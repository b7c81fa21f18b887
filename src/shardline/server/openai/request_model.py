"""What all request bodies have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

MAX_FIELDS = 256
"""The most fields of one object. Every unknown field would become an error of its own."""


class RequestModel(BaseModel):
    """A request body, or an object in it. Unknown fields and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"an object has {len(value)} fields; at most {MAX_FIELDS} are taken")
        return value
