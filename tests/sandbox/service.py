"""A service for the tests of sandboxes: the first word of a job says what it does."""

from __future__ import annotations

import ctypes
import os
import time

from shardline.sandbox.nursery import Service


def open_service(argument: str) -> Service:
    """Answers with the argument, or does what hurts."""

    def serve(body: bytes) -> bytes:
        match body.decode():
            case "spin":
                while True:
                    pass
            case "sleep":
                time.sleep(60)
            case "fill":
                kept = [bytearray(1 << 20) for _ in range(4096)]
                return str(len(kept)).encode()
            case "abort":
                os.abort()
            case "overflow":
                ctypes.string_at(1)  # as a stack that has overflowed
            case "nap":
                time.sleep(0.2)
            case "raise":
                raise ValueError("a mistake of the service")
            case "pid":
                return str(os.getpid()).encode()
        return argument.encode() + body

    return serve
