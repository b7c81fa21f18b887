"""A server process with a fake engine, for tests of start and end: python -m tests.server.serve_fake OPTIONS

OPTIONS is JSON: `config` (fields of ServerConfig), `seconds_per_token`, `die_after_steps`, `never_ready`,
`start_error` ("ValueError" or "RuntimeError").
"""

from __future__ import annotations

import json
import sys
from typing import Any

from shardline.api.async_llm import AsyncLLM
from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig
from shardline.server.launch import run_server
from tests.server.fake_engine import fake_llm


def main(options: dict[str, Any]) -> int:
    def start(config: EngineConfig) -> AsyncLLM:
        llm, engine = fake_llm(config)
        engine.seconds_per_token = options.get("seconds_per_token", 0.0)
        if "start_error" in options:
            engine.start_error = {"ValueError": ValueError, "RuntimeError": RuntimeError}[options["start_error"]](
                "oh no"
            )
        engine.die_after_steps = options.get("die_after_steps")
        if not options.get("never_ready"):
            engine.load.set()
        return llm

    config = EngineConfig.from_options(on_failure="exit" if "die_after_steps" in options else "restart")
    try:
        return run_server(config, ServerConfig(**{"port": 0, **options.get("config", {})}), start_llm=start)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
