"""`shardline router`: one address in front of many servers; `shardline router ACTION` for one that runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from shardline.cli.flags import add_flags, fields_from_flags
from shardline.config.router import RouterConfig
from shardline.config.server import ServerConfig

_PORT = 9000
_ANSWER_SECONDS = 10.0
"""In which a router must answer; during a rollout, it is the time of a step."""
_MOST_SECONDS = 7 * 86400.0
_ACTIONS = ("status", "add", "drain", "undrain", "remove", "rollout")
_OF_ALL = ("status", "rollout")
"""Actions that are for no single backend."""
_OF_SERVER = frozenset(
    {
        "host", "port", "uds", "api_key", "api_key_file", "admin_api_key", "ssl_keyfile", "ssl_certfile",
        "allowed_origins", "allow_credentials", "allowed_methods", "allowed_headers", "max_request_bytes",
        "enable_request_id_headers", "disable_access_log", "root_path", "uvicorn_log_level", "shutdown_timeout",
    }
)  # fmt: skip
"""Fields of ServerConfig that mean the same for a router."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "router",
        help="one address in front of many servers",
        description="Route requests to servers that speak the OpenAI API, or look at and change a running router.",
    )
    parser.add_argument("action", nargs="?", choices=_ACTIONS, help="ask the router at --url; without it, run one")
    parser.add_argument("backend_url", nargs="?", metavar="URL", help="the backend that an action is for")
    parser.add_argument("--url", default=f"http://127.0.0.1:{_PORT}", help="where the running router is")
    parser.add_argument(
        "--restart", metavar="COMMAND", help="rollout: restarts a backend; {host}, {port} and {url} are the backend's"
    )
    parser.add_argument(
        "--step-timeout", type=float, default=600.0, help="rollout: seconds for each step with a backend"
    )
    add_flags(parser, RouterConfig, "router")
    skip = [field.name for field in dataclasses.fields(ServerConfig) if field.name not in _OF_SERVER]
    add_flags(parser, ServerConfig, "server", skip)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run a router until SIGINT or SIGTERM, or carry out an action; returns the exit code."""
    if args.action is not None:
        return _act(args)
    server = {"port": _PORT, **fields_from_flags(args, ServerConfig)}
    config = RouterConfig(**fields_from_flags(args, RouterConfig))
    from shardline.process_title import set_process_title
    from shardline.router.launch import run_router

    set_process_title("router")
    return run_router(config, ServerConfig(**server))


def _act(args: argparse.Namespace) -> int:
    """Carry out an action, and show the fleet; returns the exit code.

    Raises:
        ValueError: the router refuses it.
        OSError: there is no router.
        RuntimeError: a rollout has stopped.
    """
    from shardline.benchmark.http_client import split_url

    if (args.backend_url is None) != (args.action in _OF_ALL):
        needs_none = args.action in _OF_ALL
        raise ValueError(f"{args.action} takes no URL" if needs_none else f"{args.action}: which backend's URL?")
    if (args.restart is None) != (args.action != "rollout"):
        raise ValueError("rollout needs --restart 'COMMAND {host}', and nothing else takes it")
    split_url(args.url)
    if not 0 < args.step_timeout <= _MOST_SECONDS:
        raise ValueError(f"--step-timeout must be seconds above 0, at most a week, got {args.step_timeout:g}")
    given = fields_from_flags(args, RouterConfig) | fields_from_flags(args, ServerConfig)
    if of_router := sorted(given.keys() - {"api_key", "admin_api_key"}):
        flag = of_router[0].replace("_", "-")
        raise ValueError(f"--{flag} is for a router that starts; {args.action} asks the one at --url (now {args.url})")

    def ask(action: str, backend_url: str | None) -> dict[str, Any]:
        return _ask(args, action, backend_url)

    if args.action == "rollout":
        from shardline.router.rollout import roll_out

        roll_out(ask, args.restart, args.step_timeout, lambda line: print(line, flush=True))
    status = ask("status" if args.action == "rollout" else args.action, args.backend_url)
    print(f"policy {status['policy']}")
    for backend in status["backends"]:
        problem = f"  {backend['problem']}" if backend["problem"] else ""
        models = ", ".join(backend["models"]) or "-"
        drained = "  (drained)" if backend["draining"] and backend["state"] != "draining" else ""
        print(f"{backend['state']:9s} {backend['requests']:4d} running  {backend['url']}  {models}{problem}{drained}")
    return 0


def _ask(args: argparse.Namespace, action: str, backend_url: str | None) -> dict[str, Any]:
    """Have the running router carry out an action; returns its status. Raises as `_act`."""
    import urllib.error
    import urllib.request

    body = None if backend_url is None else json.dumps({"url": backend_url}).encode()
    request = urllib.request.Request(f"{args.url.rstrip('/')}/router/{action}", body)
    seconds = args.step_timeout if args.action == "rollout" else _ANSWER_SECONDS
    server = ServerConfig(**fields_from_flags(args, ServerConfig))
    if key := server.admin_api_key or next(iter(server.keys), None):
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            status: dict[str, Any] = json.load(answer)
            return status
    except urllib.error.HTTPError as error:
        said = error.read()
        try:
            refusal = json.loads(said)["error"]
            message = refusal["message"]
            is_router = refusal.get("code") != "unknown_url"
        except (ValueError, LookupError, TypeError, AttributeError):
            is_router = False
        if not is_router:
            message = f"{args.url} is no router: it says {error.code} to {request.selector}; say where it is with --url"
        hint = " Pass the router's --admin-api-key, or its --api-key if it has no other." if error.code == 401 else ""
        raise ValueError(message + hint) from None
    except urllib.error.URLError as error:
        raise OSError(f"there is no router at {args.url} ({error.reason}); say where it is with --url") from None
    except TimeoutError:
        raise OSError(f"the router at {args.url} has not answered in {seconds:g} s") from None
