"""Adapters (LoRA) that come and go while the server runs: POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import APIRouter, Depends
from starlette.responses import PlainTextResponse, Response

from shardline import env
from shardline.server.documentation import Responses, json_answers
from shardline.server.errors import ApiError, bad_request
from shardline.server.json_body import RequestModel, StrictRoute
from shardline.server.service import Service

_MAX_NAME_CHARS = 256
_DONE = {"description": "What was done.", "content": {"text/plain": {"schema": {"type": "string"}}}}
_ANSWERS: Responses = {**json_answers(str), 200: _DONE}


class LoadAdapterRequest(RequestModel):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    """The folder that PEFT has written; a relative path is one below --lora-root."""
    load_inplace: bool | None = None
    """The name may be taken: then it is that of this adapter from now on."""
    base_model_name: str | None = None


class UnloadAdapterRequest(RequestModel):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None
    """Accepted, but has no effect: names are unique."""


def adapter_routes(service: Service) -> APIRouter:
    """The endpoints. They need the admin key, where one is set."""
    router = APIRouter(route_class=StrictRoute, dependencies=[Depends(service.require_ready)])

    @router.post("/v1/load_lora_adapter", response_class=Response, responses=_ANSWERS)
    async def load_adapter(body: LoadAdapterRequest) -> Response:
        """Let requests name an adapter as their model. The ranks load it with the first of them."""
        name, adapters = body.lora_name, service.adapters
        if not 1 <= len(name) <= _MAX_NAME_CHARS:
            raise bad_request(f"'lora_name' must have 1 to {_MAX_NAME_CHARS} characters.", "lora_name")
        if name in service.model_names:
            raise bad_request(f"'{name}' is the name of the served model.", "lora_name")
        folder = _folder(service.config.lora_root, body.lora_path)
        try:
            ref = await asyncio.to_thread(adapters.read, str(folder))
        except ValueError as error:
            if service.llm.config.lora.enable_lora and not await asyncio.to_thread(_is_there, folder):
                message = f"There is no adapter {str(folder)!r:.300}."
                raise ApiError(404, message, param="lora_path", code="adapter_not_found") from error
            raise bad_request(str(error), "lora_path") from error
        if name in adapters.named and not body.load_inplace:
            raise bad_request(
                f"The adapter '{name}' has already been loaded; 'load_inplace' replaces it, and a new name keeps both.",
                "lora_name",
            )
        adapters.put(name, ref, body.base_model_name or "")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", response_class=Response, responses=_ANSWERS)
    async def unload_adapter(body: UnloadAdapterRequest) -> Response:
        """Forget the name of an adapter. Requests that run keep theirs."""
        if not service.adapters.remove(body.lora_name):
            raise ApiError(
                404, f"The adapter '{body.lora_name:.256}' is not loaded.", param="lora_name", code="model_not_found"
            )
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router


def _is_there(path: Path) -> bool:
    return path.is_dir() or (path.suffix == ".gguf" and path.is_file())


def _folder(root: str | None, path: str) -> Path:
    """The folder of an adapter, which must be in `root`.

    Raises:
        ApiError: 400.
    """
    if root is None and not env.takes_any_lora_folder():
        raise bad_request("No adapter is loaded at run time: start the server with --lora-root FOLDER.", "lora_path")
    home = Path(root or ".").resolve()
    try:
        folder = (home / path).resolve()
        folder.exists()  # names may be too long
    except (OSError, ValueError, RuntimeError):
        raise bad_request("'lora_path' is no path.", "lora_path") from None
    if root is not None and not folder.is_relative_to(home):
        raise bad_request(f"'lora_path' must be a folder in {home} (--lora-root).", "lora_path")
    return folder
