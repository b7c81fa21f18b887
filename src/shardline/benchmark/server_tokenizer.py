"""The tokenizer of a server, which answers /tokenize and /detokenize as this one and vLLM do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from shardline.benchmark.http_client import HttpClient
from shardline.text.tokenizer import Tokenizer

_AT_ONCE = 32
_WORDS = (
    "the of and to in is that it was for on are as with his they be at one have this from or had by hot but some what "
    "there we can out other were all your when up use word how said an each she which do their time if will way about "
    "many then them would write like so these her long make thing see him two has look more day could go come did my "
    "sound no most number who over know water than call first people may down side been now find 0 1 2 3 4 5 6 7 8 9"
)


class ServerTokenizer:
    """What datasets need of a `Tokenizer`, asked of a server.

    Raises:
        OSError: the server has no /tokenize, or cannot be reached.
    """

    def __init__(self, client: HttpClient, headers: dict[str, str], model: str) -> None:
        self._client = client
        self._headers = {**headers, "Content-Type": "application/json"}
        self._model = model
        self._loop = asyncio.new_event_loop()
        try:
            # Those of random prompts: a server does not say which of its tokens are special.
            self.ordinary_ids = sorted(set(self.encode_text(_WORDS, add_special_tokens=False)))
        except BaseException:
            self.close()
            raise

    def encode_text(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """See Tokenizer."""
        return self.encode_texts([text], add_special_tokens)[0]

    def encode_texts(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """See Tokenizer."""
        bodies = [{"prompt": text, "add_special_tokens": add_special_tokens} for text in texts]
        return [[int(token) for token in found] for found in self._ask("/tokenize", bodies, "tokens")]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See Tokenizer."""
        return str(self._ask("/detokenize", [{"tokens": list(ids)}], "prompt")[0])

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _ask(self, path: str, bodies: Sequence[dict[str, Any]], field: str) -> list[Any]:
        async def one(body: dict[str, Any]) -> Any:
            data = msgspec.json.encode({"model": self._model, **body})
            status, answer = await self._client.fetch("POST", path, self._headers, data)
            try:
                return msgspec.json.decode(answer)[field]
            except (msgspec.MsgspecError, LookupError, TypeError):
                raise OSError(f"{path} answers {status}: {answer[:100].decode(errors='replace')!r}") from None

        async def every() -> list[Any]:
            found: list[Any] = []
            for start in range(0, len(bodies), _AT_ONCE):
                found += await asyncio.gather(*map(one, bodies[start : start + _AT_ONCE]))
            return found

        return self._loop.run_until_complete(every())


PromptTokenizer = Tokenizer | ServerTokenizer
