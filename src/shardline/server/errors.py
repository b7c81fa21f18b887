"""Errors as OpenAI words them: `{"error": {"message", "type", "param", "code"}}` with the status to match."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

logger = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class ApiError(HTTPException):
    """An answer other than success.

    Args:
        status: HTTP status.
        message: for people: what is wrong and what would work.
        type: OpenAI's error type.
        param: the field of the request that is at fault.
        code: a stable word that programs can test.
        retry_after: seconds after which trying again makes sense.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        headers = None if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status, message, headers)
        self.body = msgspec.json.encode({"error": {"message": message, "type": type, "param": param, "code": code}})
        """The JSON of the answer."""

    def response(self) -> Response:
        """This error as a whole HTTP answer."""
        return Response(self.body, self.status_code, self.headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request can never work as it is."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str, retry_after: int | None = None) -> ApiError:
    """A 503: not now, or not here any more."""
    return ApiError(503, message, type=SERVER_ERROR, code=code, retry_after=retry_after)


def internal_error() -> ApiError:
    """A 500; what happened is in the log, not in the answer."""
    return ApiError(
        500, "The server had an error while processing your request.", type=SERVER_ERROR, code="internal_error"
    )


def install_error_handlers(app: FastAPI) -> None:
    """Give every error that the framework can raise the shape above."""
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(Exception, _answer_crash)


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _answer_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return explain_validation(error.errors()).response()


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    if error.status_code == 404:
        return ApiError(404, f"Invalid URL ({request.method} {path})", code="unknown_url").response()
    if error.status_code == 405:
        answer = ApiError(405, f"Not allowed to {request.method} on {path}.", code="method_not_allowed")
        answer.headers = error.headers
        return answer.response()
    return ApiError(error.status_code, str(error.detail)).response()


async def _answer_crash(request: Request, error: Exception) -> Response:
    # The framework logs the traceback and raises the error again after this answer.
    return internal_error().response()


def explain_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """One readable 400 from what pydantic found: the first field at fault, in OpenAI's words where it has them."""
    first = errors[0]
    kind, message = first["type"], first["msg"]
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", message)
        return bad_request(
            f"We could not parse the JSON body of your request: {reason} at character {first['loc'][-1]}."
        )
    path = [part for part in first["loc"] if part != "body"]
    if not path:
        if kind == "missing":
            return bad_request("The request has no body; a JSON object is expected.")
        return bad_request("The body must be a JSON object, sent with the header Content-Type: application/json.")
    field = str(path[0])
    if kind == "extra_forbidden":
        name = _spell(path)
        return bad_request(f"Unrecognized request argument supplied: {name}", name, "unknown_parameter")
    if kind == "missing":
        name = _spell(path)
        return bad_request(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    if kind == "value_error":
        return bad_request(message.removeprefix("Value error, "), field)
    branches = {str(error["msg"]) for error in errors if error["loc"][:2] == first["loc"][:2]}
    if len(branches) > 1:
        # A union: pydantic reports each of its branches with a path that names types, which says nothing to a client.
        return bad_request(f"Invalid type for '{field}': {' or '.join(_lower(b) for b in sorted(branches))}.", field)
    return bad_request(f"Invalid value for '{_spell(path)}': {_lower(message)}.", _spell(path))


def _lower(message: str) -> str:
    return message.removeprefix("Input should be ").removeprefix("a valid ") or message


def _spell(path: Sequence[Any]) -> str:
    """A path as OpenAI writes it, for example messages[0].role."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
