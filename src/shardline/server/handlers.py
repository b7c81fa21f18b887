"""Every error that a request can end with, answered in one shape."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from shardline.server.errors import ApiError, internal_error
from shardline.server.validation import explain_validation


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
    return explain_validation(error.errors(), error.body).response()


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
