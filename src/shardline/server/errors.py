"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` with the matching HTTP status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RETRY_STARTING_SECONDS = 2
RETRY_DRAINING_SECONDS = 5
RETRY_CONNECTIONS_SECONDS = 2
RETRY_BODIES_SECONDS = 2
_NAMED_MODELS = 100
"""How many names a 404 lists."""
_EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer",
    "float_parsing": "a number",
    "bool_parsing": "a boolean",
    "float_type": "a number",
    "bool_type": "a boolean",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_BOUNDS = ("greater_than_equal", "less_than_equal")
_TYPES = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array", dict: "an object"}
_PLURALS = {"str": "strings", "int": "integers", "dict": "objects"}
T = TypeVar("T")
Path = tuple[str | int, ...]


class ApiError(HTTPException):
    """An error that a client gets as its answer.

    Args:
        status: HTTP status.
        message: tells people what is wrong and what would work.
        type: OpenAI's error type.
        param: the field of the request that is wrong.
        code: a stable word that programs can test.
        retry_after: seconds after which the client may try again.
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
        self.code = code
        headers = None if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status, message, headers)
        self.body = msgspec.json.encode({"error": {"message": message, "type": type, "param": param, "code": code}})
        """The JSON of the answer."""

    def response(self) -> Response:
        """The error as an HTTP answer."""
        return Response(self.body, self.status_code, self.headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request is wrong and will never succeed."""
    return ApiError(400, message, param=param, code=code)


def missing_parameter(name: str) -> ApiError:
    """A 400: the request lacks a field."""
    return bad_request(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")


def require_value(value: T | None, name: str) -> T:
    """The value of a field, which only some requests may leave out.

    Raises:
        ApiError: 400, it is missing.
    """
    if value is None:
        raise missing_parameter(name)
    return value


def unavailable(message: str, code: str, retry_after: int | None = None) -> ApiError:
    """A 503: the server cannot run the request now, or has stopped for good."""
    return ApiError(503, message, type=SERVER_ERROR, code=code, retry_after=retry_after)


def too_many_connections() -> ApiError:
    """The answer on connections for which no descriptor is left."""
    message = "The server has too many connections; try again later."
    return unavailable(message, "too_many_connections", RETRY_CONNECTIONS_SECONDS)


def draining() -> ApiError:
    """The answer to new requests during shutdown."""
    return unavailable("The server is shutting down and takes no new requests.", "draining", RETRY_DRAINING_SECONDS)


def interrupted() -> ApiError:
    """The answer to requests that are still running when a shutdown must end them."""
    return unavailable(
        "The server is shutting down, and this answer was not finished in time.", "draining", RETRY_DRAINING_SECONDS
    )


def engine_dead(reason: str) -> ApiError:
    """The answer to requests after the engine's death."""
    return unavailable(f"The engine has stopped: {reason or 'its process has ended'}", "engine_dead")


def not_ready(state: str, dead_reason: str) -> ApiError:
    """The answer to requests while the engine's state is another one than "ready"; `dead_reason`: why it is dead."""
    if state == "starting":
        return unavailable("The model is still loading; try again later.", state, RETRY_STARTING_SECONDS)
    if state == "recovering":
        return unavailable("The engine has failed and is restarting; try again later.", state, RETRY_STARTING_SECONDS)
    return draining() if state == "draining" else engine_dead(dead_reason)


def generates_nothing(tasks: Sequence[str]) -> ApiError:
    """The answer to requests for text, of a model that has these tasks instead."""
    paths = "/v1/embeddings, /pooling" if "embed" in tasks else "/classify, /pooling"
    return bad_request(
        f"This server generates no text (--runner pooling): use {paths}, /score or /rerank.",
        code="unsupported_parameter",
    )


def generates_text() -> ApiError:
    """The answer to requests for embeddings or scores, of a model that generates."""
    return bad_request(
        "This server generates text: start one with --runner pooling for embeddings, or with a classifier "
        "(ForSequenceClassification) for its scores.",
        code="unsupported_parameter",
    )


def no_such_model(name: str, known: Sequence[str]) -> ApiError:
    """A 404: the model `name` is not served here, but those that are `known`."""
    served = ", ".join(f"`{one}`" for one in known[:_NAMED_MODELS]) + ", …" * (len(known) > _NAMED_MODELS)
    return ApiError(
        404,
        f"The model `{name}` does not exist or you do not have access to it. Served here: {served}.",
        param="model",
        code="model_not_found",
    )


def body_too_large(limit: int) -> ApiError:
    """A 413: a request's body has more than `limit` bytes."""
    return ApiError(
        413,
        f"The request body is larger than {limit} bytes; the server's --max-request-bytes sets this limit.",
        code="request_too_large",
    )


def too_many_large_bodies() -> ApiError:
    """A 429: the server holds as many bytes of bodies as it takes."""
    return ApiError(
        429,
        "The server holds too many large requests; try again later.",
        type="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after=RETRY_BODIES_SECONDS,
    )


def answer_failed(reason: str) -> ApiError:
    """A 500: the engine gave up on one answer, and goes on with all others."""
    return ApiError(500, f"The answer could not be completed: {reason}", type=SERVER_ERROR, code="answer_failed")


def internal_error() -> ApiError:
    """A 500. The log says what happened; the answer does not."""
    return ApiError(
        500, "The server had an error while processing your request.", type=SERVER_ERROR, code="internal_error"
    )


class ErrorBody(BaseModel):
    """An error, for /openapi.json."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The answer to a request that failed."""

    error: ErrorBody


def explain_validation(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """A 400 for the first wrong field.

    If a field may have several types, pydantic reports an error for each type. The answer then names the innermost
    wrong place, or lists all the types.
    """
    error = errors[0]
    path = _path(error["loc"], body)
    if error["loc"] == ("body",):
        if error["type"] == "missing" or body is None:
            return bad_request("The request has no body; a JSON object is expected.")
        if error["type"] == "value_error":
            return bad_request(error["msg"])
        return bad_request("The body must be a JSON object, sent with the header Content-Type: application/json.")
    if error["type"] in ("missing", "extra_forbidden") or len(path) == len(error["loc"]) - 1:
        return _wrong_value(path, error)
    return _wrong_union(errors, body)


def _wrong_union(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """The answer if the first error is in one branch of a union. The client meant the branch that matched deepest."""
    stem = _union_path(errors[0]["loc"], body)
    rivals = [(_path(error["loc"], body), error) for error in errors if _union_path(error["loc"], body) == stem]
    deepest = max(len(path) for path, _ in rivals)
    furthest = [(path, error) for path, error in rivals if len(path) == deepest]
    if len(furthest) == 1:
        return _wrong_value(*furthest[0])
    branches = dict.fromkeys(_type_in_words(str(error["loc"][len(stem) + 1])) for _, error in rivals)
    name = _format_path(stem)
    return bad_request(f"Invalid type for '{name}': expected {' or '.join(branches)}.", name, "invalid_type")


def _wrong_value(path: Path, error: Mapping[str, Any]) -> ApiError:
    if error["type"] == "missing":
        return missing_parameter(_format_path((*path, str(error["loc"][-1]))))
    name, value = _format_path(path), error.get("input")
    if error["type"] == "extra_forbidden":
        return bad_request(f"Unrecognized request argument supplied: {name}", name, "unknown_parameter")
    expected = _EXPECTED.get(error["type"])
    if expected is not None:
        got = "null" if value is None else _TYPES.get(type(value), "something else")
        return bad_request(
            f"Invalid type for '{name}': expected {expected}, but got {got} instead.", name, "invalid_type"
        )
    message = error["msg"].replace(" after validation", "")
    # Clients of vLLM look for these names of bounds, also in the message.
    code, shown = (error["type"], f" ({error['type']})") if error["type"] in _BOUNDS else ("invalid_value", "")
    return bad_request(f"Invalid value for '{name}': {message[0].lower()}{message[1:]}{shown}.", name, code)


def _path(loc: Sequence[str | int], body: Any) -> Path:
    """The part of `loc` that leads into `body`, without the names of union branches."""
    if loc[0] != "body":
        return tuple(loc[1:])  # of the URL
    path: list[str | int] = []
    for part in loc[1:]:
        if _has_part(body, part):
            body = body[part]
            path.append(part)
    return tuple(path)


def _union_path(loc: Sequence[str | int], body: Any) -> Path:
    """The part of `loc` before the first name of a union branch: the place of the union."""
    for length, part in enumerate(loc[1:]):
        if not _has_part(body, part):
            return tuple(loc[1 : length + 1])
        body = body[part]
    return tuple(loc[1:])


def _has_part(body: Any, part: str | int) -> bool:
    if isinstance(body, dict):
        return part in body
    return isinstance(body, list) and isinstance(part, int) and part < len(body)


def _type_in_words(tag: str) -> str:
    """The type in words for the name of a branch: list[str] is an array of strings."""
    depth = tag.count("list[")
    inner = tag.replace("list[", "").rstrip("]")
    if not depth:
        return "a string" if inner == "str" else "an object"
    return "an array of " + "arrays of " * (depth - 1) + _PLURALS.get(inner, "objects")


def _format_path(path: Sequence[str | int]) -> str:
    """A path as OpenAI writes it, for example messages[0].role."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
