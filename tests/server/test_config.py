from __future__ import annotations

import pytest

from shardline.config.server import ServerConfig


def test_defaults_listen_on_this_machine_only() -> None:
    config = ServerConfig()
    assert config.host == "127.0.0.1"
    assert config.body_limit == 16 * 2**20
    assert config.allowed_origins == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 70000}, r"port must be in \[0, 65535\]"),
        ({"host": ""}, "host must not be empty"),
        ({"api_key": ("",)}, "api_key must not be empty"),
        ({"api_key": "secret"}, "api_key must be a sequence"),
        ({"api_key": ("schlüssel",)}, "printable ASCII"),
        ({"admin_api_key": ""}, "printable ASCII"),
        ({"api_key_file": "/no/keys"}, "there is no file"),
        ({"allowed_origins": ("example.org",)}, "is no origin"),
        ({"allowed_origins": ("https://example.org/",)}, "is no origin"),
        ({"ssl_keyfile": "key"}, "together"),
        ({"ssl_keyfile": "/no/key", "ssl_certfile": "/no/cert"}, "there is no file"),
        ({"max_request_bytes": "lots"}, "is not a size"),
        ({"max_request_bytes": 0}, "at least 1"),
        ({"response_store_bytes": -1}, "at least 0"),
        ({"root_path": "api"}, "start with /"),
        ({"uvicorn_log_level": "loud"}, "must be one of"),
        ({"structured_outputs_config": '{"front": "x"}'}, "unknown key 'front'"),
        ({"structured_outputs_config": "[1]"}, "structured_outputs_config must be"),
        ({"shutdown_timeout": -1.0}, "shutdown_timeout must be seconds"),
        ({"shutdown_delay": float("nan")}, "shutdown_delay must be seconds"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerConfig(**options)  # type: ignore[arg-type]


def test_a_wrong_key_is_never_shown() -> None:
    with pytest.raises(ValueError, match="api_key") as caught:
        ServerConfig(api_key="secret")  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)
