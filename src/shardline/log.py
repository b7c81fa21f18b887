"""One logging set-up for every process."""

from __future__ import annotations

import logging

from shardline import env


def configure_logging() -> None:
    """Log to stderr, one line each, at SHARDLINE_LOG_LEVEL."""
    logging.basicConfig(
        level=env.log_level(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
