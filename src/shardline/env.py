"""Environment variables. No other module reads os.environ."""

from __future__ import annotations

import os
from pathlib import Path

_JOIN_TOKEN = "SHARDLINE_JOIN_TOKEN"


def cuda_visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES as the user set it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def cache_folder() -> Path:
    """The folder shardline in XDG_CACHE_HOME, or else in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardline"


def log_level() -> str:
    """SHARDLINE_LOG_LEVEL, else VLLM_LOGGING_LEVEL: DEBUG, INFO (default), WARNING or ERROR."""
    return (os.environ.get("SHARDLINE_LOG_LEVEL") or os.environ.get("VLLM_LOGGING_LEVEL") or "INFO").upper()


def api_key() -> str | None:
    """SHARDLINE_API_KEY, else VLLM_API_KEY: the key that clients must send, if --api-key is not given.

    Raises:
        ValueError: both are set, and they differ.
    """
    own, other = os.environ.get("SHARDLINE_API_KEY"), os.environ.get("VLLM_API_KEY")
    if own and other and own != other:
        raise ValueError("the variables SHARDLINE_API_KEY and VLLM_API_KEY are both set and differ; unset one of them")
    return own or other


def vllm_variables() -> dict[str, str]:
    """All VLLM_* variables."""
    return {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}


def keep_alive_seconds() -> int:
    """VLLM_HTTP_TIMEOUT_KEEP_ALIVE: seconds for which an idle connection stays open.

    Raises:
        ValueError: it is no whole number.
    """
    seconds = os.environ.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE") or "60"
    if not seconds.isdecimal():
        raise ValueError(f"VLLM_HTTP_TIMEOUT_KEEP_ALIVE must be a whole number of seconds, got {seconds!r}")
    return int(seconds)


def takes_any_model_name() -> bool:
    """VLLM_SKIP_MODEL_NAME_VALIDATION: whether requests may name any model."""
    return os.environ.get("VLLM_SKIP_MODEL_NAME_VALIDATION", "").lower() in ("1", "true")


def takes_any_lora_folder() -> bool:
    """VLLM_ALLOW_RUNTIME_LORA_UPDATING: whether clients may have LoRAs loaded from everywhere on this host."""
    return os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true")


def openai_api_key() -> str | None:
    """OPENAI_API_KEY: the key that clients of other servers send."""
    return os.environ.get("OPENAI_API_KEY")


def force_isa() -> str | None:
    """SHARDLINE_ISA: use this CPU kernel path instead of the best one."""
    return os.environ.get("SHARDLINE_ISA")


def serve_host() -> str | None:
    """SHARDLINE_HOST: the address to listen on if --host is not given. Container images set it."""
    return os.environ.get("SHARDLINE_HOST") or None


def host_address() -> str | None:
    """SHARDLINE_HOST_IP, else VLLM_HOST_IP: the address at which other nodes reach this one."""
    return os.environ.get("SHARDLINE_HOST_IP") or os.environ.get("VLLM_HOST_IP")


def join_token() -> str | None:
    """SHARDLINE_JOIN_TOKEN: the secret that all nodes of a cluster share."""
    return os.environ.get(_JOIN_TOKEN)


def ray_address() -> str | None:
    """RAY_ADDRESS: the Ray cluster to join."""
    return os.environ.get("RAY_ADDRESS")


def adopt_ray_token_auth() -> None:
    """Show Ray's token to a cluster that asks for it, unless the user has set RAY_AUTH_MODE."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")


def nccl_settings() -> dict[str, str]:
    """All NCCL_* variables."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}


def triton_cache_folder() -> Path:
    """Where Triton keeps compiled kernels: TRITON_CACHE_DIR, or else .triton/cache in TRITON_HOME or in the home."""
    home = os.environ.get("TRITON_HOME") or Path.home()
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache")


def use_triton_cache(folder: str) -> None:
    """Have Triton keep compiled kernels there, in this process and its children."""
    os.environ["TRITON_CACHE_DIR"] = folder


def adopt_isa(isa: str) -> None:
    """Use the CPU kernel path that the head has chosen, in this process and its children."""
    os.environ["SHARDLINE_ISA"] = isa


def adopt_gpus(gpus: str) -> None:
    """See only these GPUs, in this process and its children."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus


def settings_for_nodes() -> dict[str, str]:
    """Variables that the nodes of a Ray cluster get from the front, because they must be equal everywhere."""
    shared = ("SHARDLINE_ISA", "SHARDLINE_LOG_LEVEL")
    return {name: os.environ[name] for name in shared if name in os.environ} | nccl_settings()


def adopt_settings(settings: dict[str, str]) -> None:
    """Use the front's variables in this process and its children."""
    os.environ.update(settings)


def for_ray_node(gpus: str | None) -> dict[str, str]:
    """The environment of a node process that a Ray actor starts, without the limits that Ray sets for the actor."""
    hidden = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    return inherited | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})


def use_interface(name: str) -> None:
    """Have gloo and NCCL use this network interface in this process, unless the user has named another one."""
    if os.environ.get("GLOO_SOCKET_IFNAME", "lo") == "lo":
        os.environ["GLOO_SOCKET_IFNAME"] = name
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def for_children(gpus: str | None = None) -> dict[str, str]:
    """The environment of engines and workers. Unless the user set an interface, gloo listens on the loopback interface.

    The join token is left out. `gpus`: the GPUs that they see, as in CUDA_VISIBLE_DEVICES; None: as this process.
    """
    seen = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
    inherited = {name: value for name, value in os.environ.items() if name != _JOIN_TOKEN}
    return {"GLOO_SOCKET_IFNAME": "lo", **inherited, **seen}


def for_sandbox() -> dict[str, str]:
    """The environment of a sandbox's nursery, which must have one thread and needs no secret."""
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    secrets = ("KEY", "TOKEN", "SECRET", "PASSWORD")
    inherited = {name: value for name, value in os.environ.items() if not any(word in name.upper() for word in secrets)}
    return {**inherited, **threads}
