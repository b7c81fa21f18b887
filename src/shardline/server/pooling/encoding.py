"""How numbers are written in answers: as JSON, as base64 in JSON, or as bytes with a header that describes them."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response

from shardline.api.pooling import Values
from shardline.server.documentation import Responses, json_answers
from shardline.server.json_body import RequestModel

_BYTES = "application/octet-stream"


class EncodingFields(RequestModel):
    """The fields that choose it."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """The type of numbers in base64 and bytes."""
    endianness: Literal["native", "little", "big"] | None = None

    @property
    def sends_bytes(self) -> bool:
        """Whether the answer is no JSON."""
        return self.encoding_format in ("bytes", "bytes_only")

    def encode(self, values: Values) -> list[Any] | str:
        """The numbers as they stand in JSON."""
        if self.encoding_format == "base64":
            return base64.b64encode(self._to_bytes(values)).decode()
        numbers: list[Any] = values.tolist()
        return numbers

    def write_answer(self, answer: msgspec.Struct, values: Sequence[Values], headers: dict[str, str]) -> Response:
        """The answer: JSON, or the bytes of all prompts' numbers, one after another.

        With "bytes", the header `metadata` has `answer` and where the numbers of each prompt are.
        """
        if not self.sends_bytes:
            return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")
        parts = [self._to_bytes(one) for one in values]
        if self.encoding_format == "bytes":
            items, end = [], 0
            for index, (one, part) in enumerate(zip(values, parts, strict=True)):
                start, end = end, end + len(part)
                items.append(
                    {
                        "index": index,
                        "embed_dtype": self.embed_dtype or "float32",
                        "endianness": self.endianness or "native",
                        "start": start,
                        "end": end,
                        "shape": one.shape,
                    }
                )
            about = {**msgspec.to_builtins(answer), "data": items}
            # Escaped, because a header cannot have every letter of a model's name.
            headers = {**headers, "metadata": json.dumps(about, separators=(",", ":"))}
        return Response(b"".join(parts), headers=headers, media_type=_BYTES)

    def _to_bytes(self, values: Values) -> bytes:
        numbers: NDArray[Any] = values
        if self.embed_dtype == "bfloat16":
            bits = np.ascontiguousarray(values).view(np.uint32)
            # Rounded to the nearest, ties to even; no value is NaN.
            numbers = ((bits + ((bits >> 16) & 1) + np.uint32(0x7FFF)) >> 16).astype(np.uint16)
        elif self.embed_dtype == "float16":
            numbers = values.astype(np.float16)
        swaps = self.endianness not in (None, "native", sys.byteorder)
        return (numbers.byteswap() if swaps else numbers).tobytes()


def encoded_answers(body: type[msgspec.Struct]) -> Responses:
    """The answers of an endpoint with these fields, see `json_answers`."""
    answers = json_answers(body)
    answers[200]["content"][_BYTES] = {"schema": {"type": "string", "format": "binary"}}
    return answers
