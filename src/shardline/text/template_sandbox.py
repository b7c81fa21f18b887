"""The sandboxed processes in which chat templates run: what they do first, and their limits."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shardline.sandbox.blocking import Setup
from shardline.sandbox.client import Sandbox
from shardline.sandbox.confinement import Limit
from shardline.sandbox.pool import Pool
from shardline.sandbox.worker import WorkerEnded
from shardline.text.template_jobs import JOB_ENCODER, Compile, Compiled

MAX_COMPILE_SECONDS = 5.0
MAX_BYTES = 256 << 20
"""The most memory that a template may use."""

_SANDBOX = Sandbox("shardline.text.template_service", title="chat template", memory=MAX_BYTES)


def compile_templates(sources: Mapping[str, str]) -> tuple[Pool, bool]:
    """Processes in which these jinja templates are compiled, and whether they show tools to the model.

    Raises:
        ValueError: a template does not parse, or compiling it hits a limit.
    """
    job = JOB_ENCODER.encode(Compile(dict(sources)))
    pool = Pool(_SANDBOX, Setup(job, MAX_COMPILE_SECONDS))
    try:
        compiled = msgspec.json.decode(pool.run_blocking(job, MAX_COMPILE_SECONDS), type=Compiled)
    except WorkerEnded as ended:
        pool.close()
        names = ", ".join(sources)
        raise ValueError(
            f"the chat template ({names}) cannot be compiled: {explain_limit(ended, MAX_COMPILE_SECONDS)}"
        ) from None
    if compiled.error:
        pool.close()
        raise ValueError(compiled.error)
    return pool, compiled.takes_tools


def explain_limit(ended: WorkerEnded, seconds: float) -> str:
    """Which limit a template has hit."""
    return {
        Limit.TIME: f"it took more than {seconds:g} s",
        Limit.DEADLINE: f"it took more than {seconds:g} s, or the machine was too busy to run it",
        Limit.MEMORY: f"it needed more than {MAX_BYTES >> 20} MiB of memory",
        Limit.STACK: "it needed more stack than there is",
        Limit.UNKNOWN: "its process ended unexpectedly",
    }[ended.limit]
