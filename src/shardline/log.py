"""One logging set-up for every process."""

from __future__ import annotations

import logging

from shardline import env


def configure_logging() -> None:
    """Log to stderr, one line each: Shardline at SHARDLINE_LOG_LEVEL, libraries from warnings up.

    Where the program has set up logging itself, its handlers stay as they are.

    Raises:
        ValueError: SHARDLINE_LOG_LEVEL is no level.
    """
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    try:
        logging.getLogger("shardline").setLevel(env.log_level())
    except ValueError as error:
        levels = "DEBUG, INFO, WARNING, ERROR or CRITICAL"
        raise ValueError(f"SHARDLINE_LOG_LEVEL must be {levels}, got {env.log_level()!r}") from error
