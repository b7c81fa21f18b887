"""What a benchmark sends: one Sample per request, or a named workload; and what happened to each request."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True)
class Sample:
    """One request of a workload."""

    prompt: str | list[int] | list[str]
    """Text, token ids, or several texts (embeddings)."""
    prompt_len: int
    """Tokens of the prompt, as far as the client knows; the server's own number replaces it."""
    output_len: int
    """Largest number of tokens to generate."""
    timestamp: float | None = None
    """Seconds after the start at which a trace sent it."""


@dataclass(slots=True)
class Record:
    """One request. Times are time.perf_counter() in seconds."""

    prompt_len: int
    arrival: float = 0.0
    """When the workload had it."""
    intended: float = 0.0
    """When it was to be sent: its arrival, or in a closed loop the end of another request."""
    ready: float = 0.0
    """When it could be sent: the intended time, or later if it had to wait for `--max-concurrency`."""
    sent: float = 0.0
    token_times: list[float] = field(default_factory=list)
    """The arrival of each piece of output."""
    end: float = 0.0
    """The arrival of the last piece of output."""
    output_tokens: int = 0
    num_inputs: int = 1
    """Texts in the request (embeddings)."""
    texts: list[str] = field(default_factory=list)
    cause: str = ""
    """Why it failed, in words that are the same for failures of one kind; empty: it succeeded."""
    error: str = ""
    """What the server or the network said about it."""

    @property
    def succeeded(self) -> bool:
        """Whether the answer was whole."""
        return not self.cause

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first piece of output; 0 without output."""
        return self.token_times[0] - self.sent if self.token_times else 0.0

    @property
    def latency(self) -> float:
        """Seconds from sending to the last piece of output."""
        return self.end - self.sent if self.end else 0.0

    @property
    def queue_time(self) -> float:
        """Seconds from its arrival until it was sent; 0 if it was not sent."""
        return max(0.0, self.sent - self.arrival) if self.sent else 0.0

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.token_times)]

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; 0 if there is none."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True)
class Workload:
    """Prompts of random tokens that are submitted together; greedy outputs of a fixed length."""

    num_prompts: int
    input_len: int
    """Tokens of a prompt, shared tokens included."""
    output_len: int
    shared_len: int = 0
    """Number of tokens that all prompts of a batch begin with."""


WORKLOADS = {
    "W1": Workload(1, 128, 64),
    "W2": Workload(32, 128, 64),
    "W3": Workload(1, 2048, 1),
    "W4": Workload(8, 1024, 64),
    "W5": Workload(32, 544, 32, shared_len=512),
    "W6": Workload(16, 2048, 128),
}


def random_prompts(rng: random.Random, vocab_size: int, count: int, length: int, shared: int = 0) -> list[list[int]]:
    """`count` prompts of `length` token ids; the first `shared` ids are the same in all prompts."""
    prefix = [rng.randrange(vocab_size) for _ in range(shared)]
    return [prefix + [rng.randrange(vocab_size) for _ in range(length - shared)] for _ in range(count)]
