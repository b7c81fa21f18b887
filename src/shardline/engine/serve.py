"""What an engine does for its front: messages in, outputs out, the step loop between."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec

from shardline.channel import Channel, readable
from shardline.engine.engine import Engine
from shardline.engine.executor.base import Executor
from shardline.messages.control import Control
from shardline.messages.engine import (
    AbortRequests,
    AddRequests,
    EngineOutputs,
    FrontMessage,
    ResetPrefixCache,
    StopEngine,
)
from shardline.messages.request import Request, SequenceOutput

_MESSAGE_SECONDS = 0.005
"""How long messages may keep a batch waiting for its next step."""

HOLD_SECONDS = 0.05
"""How long an output may wait for further ones."""


class Outbox:
    """The outputs that have not been sent, one per request. All keys are ids of requests."""

    def __init__(self) -> None:
        self._patient: dict[str, bool] = {}
        """Those whose tokens are read only at their end, and whether their first output has been put: it is sent at
        once, since it gives the time to first token."""
        self._held: dict[str, SequenceOutput] = {}
        self._held_since = 0.0

    def expect_requests(self, requests: Iterable[Request]) -> None:
        """Note requests whose outputs will be put."""
        self._patient |= {request.request_id: False for request in requests if not request.streamed}

    def put_outputs(self, outputs: Sequence[SequenceOutput], now: float) -> bool:
        """Add a step's outputs; `now` is in seconds. Returns whether it is time to call `take_outputs`."""
        if outputs and not self._held:
            self._held_since = now
        urgent = False
        for output in outputs:
            key = output.request_id
            held = self._held.get(key)
            self._held[key] = output if held is None else _joined(held, output)
            if output.finish_reason is not None:
                self._patient.pop(key, None)
            if not self._patient.get(key):
                urgent = True
                if key in self._patient:
                    self._patient[key] = True
        return urgent or (bool(self._held) and now - self._held_since >= HOLD_SECONDS)

    def take_outputs(self) -> list[SequenceOutput]:
        """The outputs that have been put since the last call."""
        outputs = list(self._held.values())
        self._held.clear()
        return outputs


def _joined(first: SequenceOutput, second: SequenceOutput) -> SequenceOutput:
    """Two outputs of a request as one."""
    return msgspec.structs.replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs if second.logprobs is None else (first.logprobs or []) + second.logprobs,
        prompt_logprobs=first.prompt_logprobs if second.prompt_logprobs is None else second.prompt_logprobs,
        timeline=second.timeline or first.timeline,
        digests=first.digests if second.digests is None else (first.digests or []) + second.digests,
    )


class EngineServer:
    """Serves one front over one channel with an engine that has started."""

    def __init__(self, channel: Channel[FrontMessage], engine: Engine, executor: Executor) -> None:
        """`executor`: that of the engine."""
        self._channel = channel
        self._engine = engine
        self._executor = executor
        self._outbox = Outbox()
        self._stopping = False

    def run(self) -> None:
        """Serve the front until it says that the engine must stop.

        Raises:
            ExecutorFailure: a rank failed.
            EOFError: the front has ended.
        """
        engine = self._engine
        while not self._stopping:
            if not engine.busy:
                self._await_message()
            changed = self._take_messages()
            if self._stopping:
                return
            if not changed and not engine.busy:
                continue
            is_time = self._outbox.put_outputs(engine.step(), time.monotonic())
            self._send_answers()
            # The last message before a pause has the gauges of the pause: blocks may be freed without an output.
            if is_time or not engine.busy:
                outputs = self._outbox.take_outputs()
                self._channel.send(EngineOutputs(outputs, engine.stats(), kv_events=engine.take_events()))

    def _await_message(self) -> None:
        """Wait for a message of the front, and check the ranks meanwhile."""
        front, executor = self._channel.fileno(), self._executor
        while True:
            pause = executor.check_ranks()
            self._send_answers()
            if readable([front, *executor.watched_fds()], pause) == [front]:
                return

    def _send_answers(self) -> None:
        answers = self._executor.answers
        if answers.joined:
            for answer in answers.take():
                self._channel.send(answer)

    def _take_messages(self) -> bool:
        """Whether a message came that may change what the engine does or reports, other than one for the ranks."""
        engine, changed = self._engine, False
        deadline = time.monotonic() + _MESSAGE_SECONDS
        while not self._stopping and readable([self._channel.fileno()]):
            if engine.busy and time.monotonic() > deadline:
                return changed
            message = self._channel.receive()
            if isinstance(message, Control):
                self._executor.submit_control(message)
                continue
            changed = True
            if isinstance(message, AddRequests):
                self._outbox.expect_requests(message.requests)
                for request in message.requests:
                    engine.add_request(request)
            elif isinstance(message, AbortRequests):
                engine.abort_requests(message.request_ids)
                # The gauges must show the blocks that came back even if no step follows.
                outputs = self._outbox.take_outputs()
                self._channel.send(EngineOutputs(outputs, engine.stats(), message.request_ids))
            elif isinstance(message, ResetPrefixCache):
                engine.reset_prefix_cache()
            elif isinstance(message, StopEngine):
                self._stopping = True
        return changed
