"""What happened to each request of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


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
        """Seconds between pieces of output."""
        return [after - before for before, after in pairwise(self.token_times)]

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; 0 if there is none."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def text(self) -> str:
        """The generated text."""
        return "".join(self.texts)
