"""The service of masks, with grammars that turn slow: for ever after a token "!", and a little after "?". After "#", it
fails; after "~", it waits without using the processor."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import tokenizers

from shardline.engine.masks import service
from shardline.sandbox.nursery import Service


def open_service(tokenizer_file: str) -> Service:
    """As the real one, but slow."""
    serve = service.open_service(tokenizer_file)
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(tokenizer_file)))
    forever, a_while, failing, waiting = (tokenizer.token_to_id(token) for token in "!?#~")

    def serve_slowly(body: bytes) -> bytes:
        token_ids = msgspec.msgpack.decode(body, type=service.MaskJob).token_ids
        while forever in token_ids:
            pass
        if waiting in token_ids:
            time.sleep(60.0)
        if failing in token_ids:
            raise KeyError("what nobody expects")
        answer = msgspec.msgpack.decode(serve(body), type=service.MaskAnswer)
        if a_while in token_ids:
            began = time.process_time()
            while time.process_time() < began + 0.02:
                pass
            answer = msgspec.structs.replace(answer, mask_seconds=0.02)
        return msgspec.msgpack.encode(answer)

    return serve_slowly
