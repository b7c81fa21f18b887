"""The form that an answer must have: the fields by which requests ask for it, under all their names."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from shardline.server.errors import bad_request
from shardline.server.json_body import RequestModel

_FORM_NAMES = {
    "regex": "regex",
    "ebnf": "grammar",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Other names of what `structured_outputs` has: SGLang's, and vLLM's old ones."""


class ResponseFormat(RequestModel):
    """The required format of the answer."""

    type: str
    json_schema: dict[str, Any] | None = None
    # Of the type structural_tag: one of both forms.
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class FormFields(RequestModel):
    """The fields of both generating endpoints."""

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    """The form of the output, as vLLM's clients ask for it."""
    regex: str | None = None
    ebnf: str | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    @property
    def requested_form(self) -> dict[str, Any] | None:
        """`structured_outputs`, or what its other names ask for.

        Raises:
            ApiError: 400, several of them are set.
        """
        forms = [{key: form} for name, key in _FORM_NAMES.items() if (form := getattr(self, name)) is not None]
        if self.structured_outputs is not None:
            forms.append(self.structured_outputs)
        if len(forms) > 1:
            names = ", ".join(map(repr, _FORM_NAMES))
            raise bad_request(f"Set one of 'structured_outputs', {names}.", "structured_outputs")
        if forms and self.guided_whitespace_pattern is not None:
            return {**forms[0], "whitespace_pattern": self.guided_whitespace_pattern}
        return forms[0] if forms else None

    @property
    def has_form(self) -> bool:
        """Whether answers are constrained."""
        has_format = self.response_format is not None and self.response_format.type != "text"
        return has_format or self.requested_form is not None


FORM_NAMES = frozenset(FormFields.model_fields)
