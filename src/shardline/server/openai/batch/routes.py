"""/v1/files and /v1/batches, as OpenAI has them. Without --batch-dir, their answers say so."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Depends, FastAPI
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from shardline.server.documentation import Responses, json_answers
from shardline.server.errors import ApiError, bad_request, missing_parameter
from shardline.server.json_body import RequestModel, StrictRoute
from shardline.server.openai.batch.executor import BatchExecutor
from shardline.server.openai.batch.form import UploadForm, read_form
from shardline.server.openai.batch.jobs import BatchJobs
from shardline.server.openai.batch.store import Batch, BatchStore, ExpiresAfter, FileObject
from shardline.server.openai.ignored_fields import MAX_ID_CHARS, check_metadata
from shardline.server.service import Service

T = TypeVar("T", FileObject, Batch)

_MAX_FILES, _MAX_BATCHES = 10_000, 100
"""The longest pages of the two lists."""
_MIN_SECONDS, _MAX_SECONDS = 3600, 2_592_000
"""How long a file may stay that expires: as at OpenAI, an hour to 30 days."""
_UPLOAD_SCHEMA: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                    },
                }
            }
        },
    }
}
_CONTENT: Responses = {**json_answers(dict[str, Any]), 200: {"content": {"application/octet-stream": {}}}}


def start_batches(app: FastAPI, service: Service) -> BatchJobs | None:
    """What runs the batches of a server; None: it has no folder for them. Call it on the event loop.

    Raises:
        ValueError: the folder cannot be used.
    """
    config = service.config
    if config.batch_dir is None:
        return None
    store = BatchStore(Path(config.batch_dir), config.batch_dir_limit)
    return BatchJobs(store, BatchExecutor(app, service.llm), service.llm, config.body_limit)


class ExpiresAfterField(RequestModel):
    """When files go by themselves."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=_MIN_SECONDS, le=_MAX_SECONDS)]


class CreateBatch(RequestModel):
    """The body of POST /v1/batches."""

    input_file_id: Annotated[str, Field(max_length=MAX_ID_CHARS)]
    endpoint: Annotated[str, Field(max_length=MAX_ID_CHARS)]
    completion_window: Annotated[str, Field(max_length=16)]
    """Any time: a batch never expires."""
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], BeforeValidator(check_metadata)] | None = None
    output_expires_after: ExpiresAfterField | None = None


class FileList(msgspec.Struct, kw_only=True):
    """A page of files."""

    object: str = "list"
    data: Sequence[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchList(msgspec.Struct, kw_only=True):
    """A page of batches."""

    object: str = "list"
    data: Sequence[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct, kw_only=True):
    """The answer to DELETE."""

    id: str
    object: str = "file"
    deleted: bool = True


def batch_routes(jobs: BatchJobs | None) -> APIRouter:
    """The endpoints; `jobs`: None: there is no folder for them."""

    async def require_folder() -> None:
        if jobs is None:
            raise ApiError(
                404,
                "This server keeps no files and runs no batches: start it with --batch-dir FOLDER.",
                code="batches_disabled",
            )

    router = APIRouter(route_class=StrictRoute, dependencies=[Depends(require_folder)])
    if jobs is None:
        _add_refusals(router)
    else:
        _add_file_routes(router, jobs.store)
        _add_batch_routes(router, jobs)
    return router


def _add_refusals(router: APIRouter) -> None:
    """Endpoints that are refused before they are called."""
    for name in ("files", "batches"):
        for path in (f"/v1/{name}", f"/v1/{name}/{{rest:path}}"):
            router.add_api_route(path, _answer_nothing, methods=["GET", "POST", "DELETE"], include_in_schema=False)


async def _answer_nothing() -> Response:
    raise AssertionError


def _add_file_routes(router: APIRouter, store: BatchStore) -> None:
    @router.post("/v1/files", responses=json_answers(FileObject), openapi_extra=_UPLOAD_SCHEMA)
    async def upload_file(request: Request) -> Response:
        """Keep a file with the requests of a batch."""
        with store.writing() as upload:
            form = await read_form(request.headers.get("content-type", ""), request.stream(), upload.write)
            upload.close()
            now = int(time.time())
            seconds = _expiry_of(form)
            file = FileObject(
                id=upload.file_id,
                bytes=upload.num_bytes,
                created_at=now,
                expires_at=None if seconds is None else now + seconds,
                filename=_filename_of(form),
                purpose="batch",
            )
            store.add_file(file)
        return _json(file)

    @router.get("/v1/files", responses=json_answers(FileList))
    async def list_files(request: Request) -> Response:
        """The files, newest first; the query may have `purpose`, `limit`, `after` and `order`."""
        purpose = request.query_params.get("purpose")
        files = [file for file in store.files() if purpose in (None, file.purpose)]
        page, more = _page(request, files, _MAX_FILES, _MAX_FILES)
        return _json(FileList(data=page, first_id=_id_at(page, 0), last_id=_id_at(page, -1), has_more=more))

    @router.get("/v1/files/{file_id}", responses=json_answers(FileObject))
    async def retrieve_file(file_id: str) -> Response:
        """The description of a file."""
        return _json(store.find_file(file_id))

    @router.get("/v1/files/{file_id}/content", responses=_CONTENT, response_class=Response)
    async def retrieve_content(file_id: str) -> Response:
        """The content of a file."""
        file = store.find_file(file_id)
        return FileResponse(store.path_of(file_id), media_type="application/octet-stream", filename=file.filename)

    @router.delete("/v1/files/{file_id}", responses=json_answers(DeletedFile))
    async def delete_file(file_id: str) -> Response:
        """Remove a file."""
        store.delete_file(file_id)
        return _json(DeletedFile(id=file_id))


def _add_batch_routes(router: APIRouter, jobs: BatchJobs) -> None:
    store = jobs.store

    @router.post("/v1/batches", responses=json_answers(Batch))
    async def create_batch(body: CreateBatch) -> Response:
        """Begin to answer the requests of a file."""
        expiry = body.output_expires_after
        return _json(
            jobs.create(
                body.input_file_id,
                body.endpoint,
                body.completion_window,
                body.metadata,
                None if expiry is None else ExpiresAfter(expiry.seconds),
            )
        )

    @router.get("/v1/batches", responses=json_answers(BatchList))
    async def list_batches(request: Request) -> Response:
        """The batches, newest first; the query may have `limit` and `after`."""
        page, more = _page(request, store.batches(), 20, _MAX_BATCHES)
        return _json(BatchList(data=page, first_id=_id_at(page, 0), last_id=_id_at(page, -1), has_more=more))

    @router.get("/v1/batches/{batch_id}", responses=json_answers(Batch))
    async def retrieve_batch(batch_id: str) -> Response:
        """How far a batch is."""
        return _json(store.find_batch(batch_id))

    @router.post("/v1/batches/{batch_id}/cancel", responses=json_answers(Batch))
    async def cancel_batch(batch_id: str) -> Response:
        """End a batch early; its answers so far remain."""
        return _json(jobs.cancel(batch_id))


def _filename_of(form: UploadForm) -> str:
    """The name of an uploaded file.

    Raises:
        ApiError: 400, there is no file, or it has another purpose.
    """
    if form.filename is None:
        raise missing_parameter("file")
    purpose = form.fields.get("purpose")
    if purpose is None:
        raise missing_parameter("purpose")
    if purpose != "batch":
        raise bad_request("'purpose' must be 'batch': this server uses files for nothing else.", "purpose")
    return form.filename


def _expiry_of(form: UploadForm) -> int | None:
    """The seconds after which an uploaded file goes by itself; None: never.

    Raises:
        ApiError: 400, they are no such number.
    """
    text = form.fields.get("expires_after[seconds]")
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 8 or not _MIN_SECONDS <= int(text) <= _MAX_SECONDS:
        raise bad_request(
            f"'expires_after[seconds]' must be a number from {_MIN_SECONDS} to {_MAX_SECONDS}.", "expires_after"
        )
    return int(text)


def _page(request: Request, entries: list[T], usual: int, most: int) -> tuple[list[T], bool]:
    """The part of a list, newest first, that the query asks for, and whether more follows.

    Raises:
        ApiError: 400, `limit`, `order` or `after` are wrong.
    """
    query = request.query_params
    limit = query.get("limit", str(usual))
    if not limit.isdecimal() or len(limit) > 8 or not 1 <= int(limit) <= most:
        raise bad_request(f"'limit' must be a number from 1 to {most}.", "limit", "invalid_value")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request("'order' must be 'asc' or 'desc'.", "order", "invalid_value")
    if order == "asc":
        entries = entries[::-1]
    if "after" in query:
        found = [index for index, entry in enumerate(entries) if entry.id == query["after"]]
        if not found:
            raise bad_request("'after' must be the id of an entry of this list.", "after", "invalid_value")
        entries = entries[found[0] + 1 :]
    return entries[: int(limit)], len(entries) > int(limit)


def _id_at(page: Sequence[FileObject | Batch], index: int) -> str | None:
    return page[index].id if page else None


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
