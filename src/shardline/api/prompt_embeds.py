"""Prompts as rows of hidden states: from tensors, and from what clients send."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardline.checkpoints.torch_file import read_torch_tensor
from shardline.messages.request import PromptEmbeds

Rows = npt.NDArray[np.float32]

PLACEHOLDER = 0
"""The token id at the places of rows."""

_ENABLE = "You must set `--enable-prompt-embeds` to input `prompt_embeds`"


def decode_rows(data: str, size: int, *, enabled: bool) -> Rows:
    """The rows [N, size] in the base64 of a file that `torch.save` has written.

    Raises:
        ValueError: they are refused, or broken.
    """
    if not enabled:
        raise ValueError(f"{_ENABLE}.")
    try:
        content = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"prompt_embeds must be the base64 of a tensor that torch.save has written: {error}") from None
    try:
        return check_rows(read_torch_tensor(content), size)
    except ValueError as error:
        raise ValueError(f"prompt_embeds could not be read as a tensor of torch: {error}") from None


def rows_of(value: Any, size: int, *, enabled: bool) -> Rows:
    """The rows [N, size] of a tensor or an array.

    Raises:
        ValueError: they are refused, or have another shape or type.
    """
    if not enabled:
        raise ValueError(f"{_ENABLE}, in Python LLM(enable_prompt_embeds=True).")
    if callable(getattr(value, "detach", None)):  # a tensor of torch; numpy knows no bfloat16
        if not value.is_floating_point():
            raise ValueError(f"prompt_embeds must be floating-point numbers, got {value.dtype}")
        value = value.detach().cpu().float().numpy()
    array = np.asarray(value)
    if array.dtype.kind != "f":
        raise ValueError(f"prompt_embeds must be floating-point numbers, got {array.dtype}")
    return check_rows(array.astype(np.float32), size)


def check_rows(rows: Rows, size: int) -> Rows:
    """The same as [N, size]; a batch of one is taken.

    Raises:
        ValueError: the shape is another one, a number is not finite, or the model takes no rows.
    """
    if size == 0:
        raise ValueError("this model takes no prompt_embeds: its layers read token ids")
    if rows.ndim == 3 and len(rows) == 1:
        rows = rows[0]
    if rows.ndim != 2 or rows.shape[1] != size:
        raise ValueError(f"prompt_embeds must have the shape (number of tokens, {size}), got {tuple(rows.shape)}")
    if not np.isfinite(rows).all():
        raise ValueError("prompt_embeds must be finite numbers")
    return rows


def join_parts(parts: Sequence[list[int] | Rows]) -> tuple[list[int], PromptEmbeds | None]:
    """A prompt whose parts are token ids and rows, as token ids and the rows among them."""
    ids: list[int] = []
    places: list[tuple[int, int]] = []
    rows: list[Rows] = []
    for part in parts:
        if isinstance(part, list):
            ids += part
        elif len(part):
            places.append((len(ids), len(part)))
            rows.append(part)
            ids += [PLACEHOLDER] * len(part)
    return ids, PromptEmbeds(np.concatenate(rows).tobytes(), places) if rows else None


def embeds_digest(embeds: PromptEmbeds) -> str:
    """A name of the rows and their places, for the keys of cached prefixes."""
    digest = hashlib.blake2b(repr(embeds.places).encode(), digest_size=16)
    digest.update(embeds.rows)
    return digest.hexdigest()
