"""When the outputs of steps are sent: at once, or several together if nobody reads them as they come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from shardline.messages.request import Request, SequenceOutput

HOLD_SECONDS = 0.05
"""How long an output may wait for further ones."""


class Outbox:
    """The outputs that have not been sent, one per choice."""

    def __init__(self) -> None:
        self._patient: set[tuple[str, int]] = set()
        """Choices whose tokens are read only at their end."""
        self._begun: set[tuple[str, int]] = set()
        """Those of them whose first output has been put; it is sent at once, since it gives the time to first token."""
        self._held: dict[tuple[str, int], SequenceOutput] = {}
        self._held_since = 0.0

    def expect_requests(self, requests: Iterable[Request]) -> None:
        """Note requests whose outputs will be put."""
        for request in requests:
            if not request.streamed:
                self._patient.add((request.request_id, request.choice))

    def put_outputs(self, outputs: Sequence[SequenceOutput], now: float) -> bool:
        """Add a step's outputs; `now` is in seconds. Returns whether it is time to call `take_outputs`."""
        if outputs and not self._held:
            self._held_since = now
        urgent = False
        for output in outputs:
            key = (output.request_id, output.choice)
            held = self._held.get(key)
            self._held[key] = output if held is None else _joined(held, output)
            if output.finish_reason is not None:
                self._patient.discard(key)
                self._begun.discard(key)
            if key not in self._begun:
                urgent = True
                if key in self._patient:
                    self._begun.add(key)
        return urgent or (bool(self._held) and now - self._held_since >= HOLD_SECONDS)

    def take_outputs(self) -> list[SequenceOutput]:
        """The outputs that have been put since the last call."""
        outputs = list(self._held.values())
        self._held.clear()
        return outputs


def _joined(first: SequenceOutput, second: SequenceOutput) -> SequenceOutput:
    """Two outputs of a choice as one."""
    return msgspec.structs.replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs if second.logprobs is None else (first.logprobs or []) + second.logprobs,
        prompt_logprobs=first.prompt_logprobs if second.prompt_logprobs is None else second.prompt_logprobs,
        timeline=second.timeline or first.timeline,
        digests=first.digests if second.digests is None else (first.digests or []) + second.digests,
    )
