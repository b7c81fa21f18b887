"""What a node tells its head about itself: hardware, versions, flags, model."""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import logging
import secrets
import socket
import time
from pathlib import Path

import msgspec

from shardline import env
from shardline.checkpoints.description import read_models
from shardline.config.cluster import ClusterConfig
from shardline.config.engine import EngineConfig
from shardline.deployment.here import probe_here
from shardline.deployment.probe import available_isas, software_versions
from shardline.deployment.resolve import model_source
from shardline.messages.node import Join

_OWN_FLAGS = {
    *("model", "tokenizer", "hf_token", "download_dir", "cpu_threads"),
    *(field.name for field in dataclasses.fields(ClusterConfig)),
}
"""Flags that nodes need not share: the model is compared by its content."""
_HEADER_BYTES = 1 << 20
_NUM_SAMPLES, _SAMPLE_BYTES = 16, 4096
"""What is compared of the weights in each file. A fine-tuned model differs from its base in every tensor."""
_RETRY_SECONDS = 1.0
_log = logging.getLogger(__name__)


def describe_node(config: EngineConfig, address: str) -> Join:
    """This node, for its head. `address`: where the other nodes reach it.

    Raises:
        ValueError: the model is not here; the message says how to fetch it.
    """
    cluster, parallel = config.cluster, config.parallel
    model = model_source(config, read_models(config))
    (host,) = probe_here(config).hosts
    host = msgspec.structs.replace(
        host, address=address, num_replicas=cluster.num_local_replicas(parallel.data_parallel_size)
    )
    return Join(
        node=cluster.node_rank or cluster.data_parallel_start_rank,
        software=software_versions(),
        flags=shared_flags(config),
        isas=available_isas(),
        host=host,
        model=model,
        weights_digest=_digest_weights(model.weight_files),
        process=secrets.token_bytes(8),
    )


def shared_flags(config: EngineConfig) -> dict[str, str]:
    """Flags that must be equal on all nodes, and their values."""
    flags = {}
    for part in (config.model, config.parallel, config.cache, config.scheduler, config.cluster):
        for field in dataclasses.fields(part):
            if field.name not in _OWN_FLAGS or field.name == "nnodes":
                flags[field.name.replace("_", "-")] = str(getattr(part, field.name))
    return flags


def own_address(cluster: ClusterConfig) -> str:
    """The address at which other nodes reach this one: the user's, else that of the route to the head.

    Raises:
        ValueError: the head's address cannot be found, or only this host can reach it.
    """
    if (chosen := env.host_address()) is not None:
        return chosen
    # The name of the head may come later than its nodes, for example on Kubernetes.
    deadline = time.monotonic() + (cluster.join_timeout if cluster.is_headless else 0.0)
    while True:
        try:
            head = socket.getaddrinfo(cluster.head_address, cluster.head_port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(head[0], socket.SOCK_DGRAM) as probe:
                probe.connect(head[4])
                address = str(probe.getsockname()[0])
            break
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ValueError(f"the head's address {cluster.head_address} cannot be reached: {error}") from error
            time.sleep(_RETRY_SECONDS)
    if ipaddress.ip_address(address).is_loopback:
        raise ValueError(
            f"{cluster.head_address} leads to {address}, which other nodes cannot reach; give --master-addr an address "
            "of the head's network, or set SHARDLINE_HOST_IP on every node"
        )
    if not cluster.is_headless and head[4][0] != address:
        _log.warning(
            "%s is not an address of this host, the head, which listens on %s: nodes reach it only if something "
            "forwards them",
            cluster.head_address,
            address,
        )
    return address


def _digest_weights(files: tuple[str, ...]) -> str:
    """A digest of the names, sizes and headers of weight files, and of pieces all over them.

    A header has the names of all tensors. To read everything would take as long as loading.
    """
    digest = hashlib.sha256()
    for file in sorted(map(Path, files)):
        with file.open("rb") as opened:
            size = file.stat().st_size
            digest.update(f"{file.name} {size} ".encode() + opened.read(_HEADER_BYTES))
            for number in range(1, _NUM_SAMPLES + 1):
                opened.seek(max(0, number * size // _NUM_SAMPLES - _SAMPLE_BYTES))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()
