"""`shardline run-batch -i in.jsonl -o out.jsonl --model MODEL`: answer all requests of a file."""

from __future__ import annotations

import argparse
from typing import Any

from shardline.cli.flags import add_engine_flags, add_flags, engine_config, fields_from_flags
from shardline.config.server import ServerConfig

_CONNECTION_FIELDS = (
    "uds", "api_key", "api_key_file", "admin_api_key", "ssl_keyfile", "ssl_certfile", "allowed_origins",
    "allow_credentials", "allowed_methods", "allowed_headers", "batch_dir", "batch_dir_bytes",
    "enable_request_id_headers", "disable_access_log", "root_path", "uvicorn_log_level", "shutdown_delay",
    "shutdown_timeout",
)  # fmt: skip
"""The fields of the server for which a batch has no use."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "run-batch",
        help="answer all requests of a file",
        description="Answer the requests of a file in OpenAI's batch format. A run that was stopped goes on behind the "
        "answers that the output file has.",
    )
    group = parser.add_argument_group("batch")
    group.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="requests, one a line: a path or an http(s) URL"
    )
    group.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="answers, one a line, in the order of the requests: a path, or an http(s) URL that takes PUT",
    )
    group.add_argument("--output-tmp-dir", metavar="FOLDER", help="where answers are until they are uploaded to a URL")
    group.add_argument("--url", dest="host", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    # A run that was stopped goes on later, so it has no use for this.
    group.add_argument("--shutdown-timeout", type=float, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add_engine_flags(parser)
    add_flags(parser, ServerConfig, "answers", skip=_CONNECTION_FIELDS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer all requests, and return the exit code. /metrics is served only if it is asked for."""
    engine, server = engine_config(args), ServerConfig(**fields_from_flags(args, ServerConfig))
    if engine.cluster.is_headless:
        raise ValueError("run-batch runs at the head; start the other nodes by serve --headless")
    from shardline.process_title import set_process_title
    from shardline.server.openai.batch.run_file import BatchFiles, run_batch

    files = BatchFiles(args.input_file, args.output_file, args.output_tmp_dir)
    set_process_title("batch")
    return run_batch(engine, server, files, serve_metrics=getattr(args, "enable_metrics", False))
