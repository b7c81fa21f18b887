"""The logging configuration of every process."""

from __future__ import annotations

import logging

from shardline import env


def configure_logging() -> None:
    """Log to stderr: Shardline's messages from SHARDLINE_LOG_LEVEL on, those of libraries from WARNING on.

    If the program has configured logging before, its handlers stay.

    Raises:
        ValueError: SHARDLINE_LOG_LEVEL is not a log level.
    """
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    try:
        logging.getLogger("shardline").setLevel(env.log_level())
    except ValueError as error:
        levels = "DEBUG, INFO, WARNING, ERROR or CRITICAL"
        raise ValueError(f"SHARDLINE_LOG_LEVEL must be {levels}, got {env.log_level()!r}") from error
