"""What a user reads."""

from __future__ import annotations

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
