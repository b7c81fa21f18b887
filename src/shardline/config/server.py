"""Configuration of the HTTP server. It is frozen and validated once; each field is a command-line flag."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardline import env
from shardline.config.fields import option, parse_bytes
from shardline.config.vllm import note_variables

METRICS_PREFIXES = ("shardline", "vllm", "both")
_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")

_WHITESPACE = "disable_any_whitespace"
_VLLM_KEYS = ("backend", "disable_fallback", "disable_additional_properties", "reasoning_parser", "enable_in_reasoning")
"""Keys that set nothing here: there is one follower of grammars."""


@dataclass(frozen=True)
class ServerConfig:
    """Everything that the server needs in addition to the engine's configuration.

    Raises:
        ValueError: a value is out of range, or two values contradict each other.
    """

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: every IPv4 interface")
    port: int = option(8000, "port to listen on; 0: any free one")
    uds: str | None = option(None, "path of a Unix domain socket to listen on, instead of an address")
    api_key: tuple[str, ...] = option(
        (), "keys that clients may send as bearer token; default: $SHARDLINE_API_KEY or $VLLM_API_KEY"
    )
    api_key_file: str | None = option(None, "file with further keys, one a line; SIGHUP makes the server read it again")
    admin_api_key: str | None = option(None, "key for administration, such as /requests; it is valid everywhere")
    served_model_name: tuple[str, ...] = option(
        (),
        "names under which the model is served, the first one in responses; default: the model as given, and the last "
        "part of a path",
    )
    ssl_keyfile: str | None = option(None, "file with the TLS private key")
    ssl_certfile: str | None = option(None, "file with the TLS certificate")
    ssl_ca_certs: str | None = option(None, "file with the authorities whose certificates clients show")
    ssl_cert_reqs: int = option(0, "0: clients show no certificate; 1: they may; 2: they must (TLS)")
    ssl_ciphers: str | None = option(None, "ciphers for TLS up to 1.2, as OpenSSL writes them; default: Python's")
    enable_ssl_refresh: bool = option(False, "read these files again when they change")
    allowed_origins: tuple[str, ...] = option(
        (), "web origins whose pages may call this server (CORS), for example http://localhost:3000; *: every one"
    )
    allow_credentials: bool = option(False, "pages of these origins may send cookies and keys (CORS)")
    allowed_methods: str = option('["*"]', "methods that these pages may use, as a JSON list (CORS)")
    allowed_headers: str = option('["*"]', "headers that these pages may send, as a JSON list (CORS)")
    middleware: tuple[str, ...] = option(
        (), "your own ASGI middleware, for example package.module.Class; or an async function (request, call_next)"
    )
    max_request_bytes: int | str = option("16MiB", "largest request body; a larger one is answered 413")
    response_store_bytes: int | str = option(
        "256MiB", "memory for the responses that /v1/responses keeps; the least recently used ones go first"
    )
    lora_root: str | None = option(
        None, "folder in which /v1/load_lora_adapter finds adapters; default: none is loaded at run time"
    )
    batch_dir: str | None = option(
        None, "folder for /v1/files and /v1/batches, which go on when the server starts again; default: there are none"
    )
    batch_dir_bytes: int | str = option("8GiB", "most bytes of files in this folder, answers of batches included")
    enable_request_id_headers: bool = option(
        False, "every answer has an X-Request-Id; otherwise those have one whose request had one"
    )
    enable_force_include_usage: bool = option(False, "every event of a stream has the usage so far")
    return_tokens_as_token_ids: bool = option(False, "log probabilities name tokens as token_id:N, not by their texts")
    receipts: bool = option(False, "every answer has a receipt, which `shardline verify` checks")
    disable_log_requests: bool = option(False, "accepted for compatibility: prompts are never logged")
    disable_access_log: bool = option(False, "no log line per request", aliases=("disable-uvicorn-access-log",))
    root_path: str = option("", "path prefix that a reverse proxy strips before it forwards")
    uvicorn_log_level: str = option("warning", "log level of the HTTP library", choices=_LOG_LEVELS)
    shutdown_delay: float = option(
        0.0, "seconds after SIGTERM, SIGINT or SIGHUP in which /ready says 503 and new requests are still taken"
    )
    shutdown_timeout: float = option(30.0, "seconds that running requests then get to finish")
    chat_template: str | None = option(None, "chat template to use instead of the model's: a file, or the text itself")
    trust_request_chat_template: bool = option(False, "a chat request may bring a template of its own (chat_template)")
    chat_template_content_format: str = option(
        "auto",
        "how the chat template sees a message's content; auto, string: as text; openai: as a list of one text part",
        choices=("auto", "string", "openai"),
    )
    default_chat_template_kwargs: str = option(
        "{}", "variables of the chat template, as a JSON object; those of a request come first"
    )
    special_tokens_in_content: bool = option(
        False, "a special token that a chat spells becomes that token, as in vLLM; without the flag it stays text"
    )
    tokens_only: bool = option(
        False, "serve token ids in and out only (/inference/v1/generate); no tokenizer is loaded"
    )
    render_only: bool = option(
        False, "answer /tokenize and the render endpoints only; no weights are loaded, and no device is needed"
    )
    response_role: str = option("assistant", "role of the answers in chats")
    disable_ui: bool = option(False, "no page at /")
    disable_fastapi_docs: bool = option(False, "no /docs and no /openapi.json")
    tool_call_parser: str = option(
        "auto", "format in which the model writes tool calls, for example hermes; auto: from its chat template"
    )
    enable_auto_tool_choice: bool = option(False, "accepted for compatibility: tools are always taken")
    reasoning_parser: str | None = option(None, "format in which the model writes reasoning, for example qwen3")
    structured_outputs_config: str | None = option(
        None, """JSON, '{"disable_any_whitespace": false}': answers with a schema may have whitespace between parts"""
    )
    enable_metrics: bool = option(True, "serve Prometheus metrics at /metrics")
    metrics_prefix: str = option(
        "both",
        "prefix of the metrics that mean what vLLM's metric of the same name means; both: they are there twice",
        choices=METRICS_PREFIXES,
    )
    otlp_traces_endpoint: str | None = option(
        None, "OpenTelemetry collector for a span per request, for example http://127.0.0.1:4318/v1/traces"
    )

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def has_page(self) -> bool:
        """Whether there is a page at /, on which people chat."""
        return not (self.disable_ui or self.render_only)

    @property
    def keys(self) -> tuple[str, ...]:
        """The valid keys; empty: every client may send requests."""
        if self.api_key:
            return self.api_key
        key = env.api_key()
        return (key,) if key else ()

    @cached_property
    def disable_any_whitespace(self) -> bool | None:
        """What requests get that do not say it; None: answers with a schema are compact, and free objects are not.

        Raises:
            ValueError: `structured_outputs_config` is malformed.
        """
        return read_structured_outputs_config(self.structured_outputs_config)

    @cached_property
    def template_variables(self) -> dict[str, Any]:
        """`default_chat_template_kwargs` as an object."""
        values = _parse_json("default_chat_template_kwargs", self.default_chat_template_kwargs)
        if not isinstance(values, dict):
            raise ValueError("default_chat_template_kwargs must be a JSON object")
        return values

    @property
    def cors_origins(self) -> tuple[str, ...]:
        """`allowed_origins`, which may also be one JSON list, as vLLM takes it."""
        if len(self.allowed_origins) == 1 and self.allowed_origins[0].lstrip().startswith("["):
            return tuple(_texts("allowed_origins", self.allowed_origins[0]))
        return self.allowed_origins

    @property
    def cors_methods(self) -> list[str]:
        """`allowed_methods` as a list."""
        return _texts("allowed_methods", self.allowed_methods)

    @property
    def cors_headers(self) -> list[str]:
        """`allowed_headers` as a list."""
        return _texts("allowed_headers", self.allowed_headers)

    @property
    def body_limit(self) -> int:
        """Largest request body, in bytes."""
        return parse_bytes(self.max_request_bytes)

    @property
    def batch_dir_limit(self) -> int:
        """Bytes of all files in `batch_dir`."""
        return parse_bytes(self.batch_dir_bytes)

    @property
    def response_store_limit(self) -> int:
        """Memory for stored responses, in bytes."""
        return parse_bytes(self.response_store_bytes)


def _texts(name: str, text: str) -> list[str]:
    """The strings of a JSON list."""
    values = _parse_json(name, text)
    if not (isinstance(values, list) and all(isinstance(value, str) for value in values)):
        raise ValueError(f'{name} must be a JSON list of strings, for example \'["GET", "POST"]\'')
    return values


def _parse_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} must be JSON: {error}") from None


def _validate(config: ServerConfig) -> None:
    def require(holds: bool, message: str) -> None:
        if not holds:
            raise ValueError(message)

    note_variables(env.vllm_variables())
    env.keep_alive_seconds()
    require(bool(config.host), "host must not be empty; 127.0.0.1 is this machine, 0.0.0.0 every interface")
    require(0 <= config.port <= 65535, f"port must be in [0, 65535], got {config.port}")
    for name in ("api_key", "served_model_name", "allowed_origins"):
        values = getattr(config, name)
        require(not isinstance(values, str), f"{name} must be a sequence of strings, not one string")
        require(all(values), f"{name} must not be empty")
    require(all(key.isascii() and key.isprintable() for key in config.keys), "api_key must be printable ASCII")
    admin = config.admin_api_key
    require(
        admin is None or (bool(admin) and admin.isascii() and admin.isprintable()),
        "admin_api_key must be printable ASCII",
    )
    _ = config.cors_methods, config.cors_headers, config.template_variables
    for origin in config.cors_origins:
        require(
            origin == "*" or re.fullmatch(r"https?://[^/\s]+", origin) is not None,
            f"allowed_origins: {origin!r} is no origin; write scheme and host, for example https://chat.example.org",
        )
    require(
        (config.ssl_keyfile is None) == (config.ssl_certfile is None),
        "ssl_keyfile and ssl_certfile must be given together",
    )
    require(config.ssl_cert_reqs in (0, 1, 2), f"ssl_cert_reqs must be 0, 1 or 2, got {config.ssl_cert_reqs}")
    require(
        config.ssl_cert_reqs == 0 or config.ssl_ca_certs is not None,
        "ssl_cert_reqs asks clients for certificates, which needs ssl_ca_certs: who signs them",
    )
    for name in ("ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"):
        require(not getattr(config, name) or config.ssl_certfile is not None, f"{name} needs ssl_certfile")
    require(
        config.chat_template_content_format in ("auto", "string", "openai"),
        f"chat_template_content_format must be auto, string or openai, got {config.chat_template_content_format!r}",
    )
    require(bool(config.response_role), "response_role must not be empty")
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "api_key_file"):
        path = getattr(config, name)
        require(path is None or os.path.isfile(path), f"{name}: there is no file {path!r}")
    _ = config.disable_any_whitespace
    require(
        not (config.render_only and config.tokens_only), "render_only needs the tokenizer that tokens_only leaves out"
    )
    require(config.body_limit >= 1, f"max_request_bytes must be at least 1, got {config.max_request_bytes}")
    require(config.batch_dir_limit >= 0, f"batch_dir_bytes must be at least 0, got {config.batch_dir_bytes}")
    require(
        config.response_store_limit >= 0, f"response_store_bytes must be at least 0, got {config.response_store_bytes}"
    )
    require(
        config.root_path == "" or (config.root_path.startswith("/") and not config.root_path.endswith("/")),
        f"root_path must start with / and not end with it, got {config.root_path!r}",
    )
    require(
        config.uvicorn_log_level in _LOG_LEVELS,
        f"uvicorn_log_level must be one of {', '.join(_LOG_LEVELS)}, got {config.uvicorn_log_level!r}",
    )
    for name in ("shutdown_delay", "shutdown_timeout"):
        seconds = getattr(config, name)
        require(0.0 <= seconds < 1e6, f"{name} must be seconds, got {seconds}")


def read_structured_outputs_config(given: str | Mapping[str, Any] | None) -> bool | None:
    """From vLLM's `structured_outputs_config`, an object or its JSON: the `disable_any_whitespace` of requests that do
    not say it. None: answers with a schema are compact, and free objects are not.

    Raises:
        ValueError: it is malformed.
    """
    if given is None:
        return None
    values: Any = given
    if isinstance(given, str):
        try:
            values = json.loads(given)
        except ValueError:
            values = None
    if not isinstance(values, Mapping) or not isinstance(values.get(_WHITESPACE), bool | None):
        raise ValueError(
            f"""structured_outputs_config must be '{{"{_WHITESPACE}": true}}' or the same with false, got {given!r}"""
        )
    if unknown := sorted(set(values) - {_WHITESPACE, *_VLLM_KEYS}):
        raise ValueError(f"structured_outputs_config has the unknown key {unknown[0]!r}; known: {_WHITESPACE}")
    disabled: bool | None = values.get(_WHITESPACE)
    return disabled
