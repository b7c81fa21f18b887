"""What a benchmark sends: one Sample per request."""

from __future__ import annotations

from dataclasses import dataclass


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
