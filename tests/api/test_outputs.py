"""What a user reads."""

from __future__ import annotations

import inspect
import re

import shardline
import shardline.types
from shardline.api.logprobs import Logprob
from shardline.api.outputs import RequestOutput
from shardline.messages.request import TokenLogprobs


def test_log_probabilities_of_a_prompt_are_shaped_once() -> None:
    """A loop over their indices must not take quadratic time."""
    decoded: list[int] = []

    def decode(token_id: int) -> str:
        decoded.append(token_id)
        return str(token_id)

    scores = [TokenLogprobs(-1.0, 1, [7], [-1.0]) for _ in range(2)]
    output = RequestOutput(request_id="r", prompt=None, prompt_token_ids=[3, 7, 8], outputs=[], decode=decode)
    assert output.prompt_logprobs is None
    output.prompt_token_logprobs = scores
    assert output.prompt_logprobs == [
        None,
        {7: Logprob(-1.0, 1, "7")},
        {8: Logprob(-1.0, 1, "8"), 7: Logprob(-1.0, 1, "7")},
    ]
    assert output.prompt_logprobs is output.prompt_logprobs
    assert len(decoded) == 3


def test_public_types_have_a_public_place() -> None:
    """Users and tools write annotations with them, so no version takes one away."""
    methods = (shardline.LLM.generate, shardline.LLM.chat, shardline.LLM.embed, shardline.LLM.score)
    returned = {
        word
        for method in methods
        for word in re.findall(r"\w+", str(inspect.signature(method).return_annotation))
        if word != "list"
    }
    assert returned <= {*shardline.__all__, *shardline.types.__all__}
    assert {"Logprob", "Prompt", "TextPrompt", "TokensPrompt", "EmbedsPrompt"} <= set(shardline.types.__all__)
    assert all(inspect.isclass(getattr(shardline.types, name)) for name in shardline.types.__all__ if name != "Prompt")
