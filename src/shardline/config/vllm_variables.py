"""Variables of vLLM that protect a server. A user who sets one must get the protection, or no server."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NOTHING_TO_PROTECT = frozenset(
    {
        "VLLM_ALLOWED_MEDIA_DOMAINS",  # no URL of a request is fetched
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS",
        "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB",  # no media are taken
        "VLLM_MAX_IMAGE_PIXELS",
        "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS",  # parsers of tool calls run in linear time
        "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS",  # the server runs no tools
        "VLLM_ALLOW_INSECURE_SERIALIZATION",  # no pickle is read
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",  # there is no such path
        "VLLM_SERVER_DEV_MODE",
        "VLLM_NO_USAGE_STATS",  # nothing is sent
        "VLLM_DO_NOT_TRACK",
    }
)
"""Protections that hold here whatever the value is."""

_HONOURED = frozenset({"VLLM_API_KEY", "VLLM_HOST_IP"})

_REFUSED = {"VLLM_MAX_N_SEQUENCES": "the bound of n is fixed here (128 for each request)"}
"""Protections that have no counterpart here, and why."""

_PROTECTIVE_WORDS = re.compile(
    r"_(AUTH|AUTHORIZATION|CERT|CERTFILE|KEY|KEYS|KEYFILE|PASSWORD|SECRET|SSL|TLS|ALLOWLIST|DENYLIST)(_|$)"
)


def check_vllm_variables(variables: Mapping[str, str]) -> None:
    """Refuse a VLLM_* variable that protects something, and that this server does not understand.

    Raises:
        ValueError: there is one.
    """
    for name, value in sorted(variables.items()):
        if not value or name in _HONOURED or name in _NOTHING_TO_PROTECT:
            continue
        if name in _REFUSED:
            raise ValueError(f"the variable {name} is set, but {_REFUSED[name]}; unset it")
        if _PROTECTIVE_WORDS.search(name):
            raise ValueError(
                f"the variable {name} seems to protect the server, but it is not understood; unset it. "
                "Keys are given in VLLM_API_KEY, SHARDLINE_API_KEY or --api-key-file"
            )
