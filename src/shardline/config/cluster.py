"""How nodes form a cluster. The flags are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass

from shardline.config.fields import option

_RPC_PORT = 29550


@dataclass(frozen=True)
class ClusterConfig:
    """The nodes of a cluster, and the place of this process among them.

    There are two ways to say it: `nnodes` and `node_rank`, where ranks are shared out evenly; or
    `data_parallel_address`, where each node says how many replicas it runs, and which is its first.
    """

    nnodes: int = option(1, "nodes, each started with the same flags and its own --node-rank", aliases=("n",))
    node_rank: int = option(0, "this node; 0: the head, which serves requests", aliases=("r",))
    master_addr: str | None = option(None, "address of the head, at which the other nodes reach it")
    master_port: int = option(29501, "port of the head for other nodes")
    headless: bool = option(False, "run ranks for the head and serve no requests; implied by a --node-rank above 0")
    data_parallel_size_local: int | None = option(
        None, "replicas on this node; 0: none, the head only serves requests", aliases=("dpl",)
    )
    data_parallel_start_rank: int = option(0, "the first replica of a headless node", aliases=("dpr",))
    data_parallel_address: str | None = option(
        None, "address of the head, if nodes differ in --data-parallel-size-local", aliases=("dpa",)
    )
    data_parallel_rpc_port: int = option(
        _RPC_PORT, "port of the head for other nodes, with --data-parallel-address", aliases=("dpp",)
    )
    data_parallel_backend: str = option(
        "mp",
        "mp: nodes are started by hand; ray: as --distributed-executor-backend ray",
        choices=("mp", "ray"),
        aliases=("dpb",),
    )
    distributed_timeout_seconds: int = option(600, "seconds within which the ranks of a group must have connected")
    join_timeout: float = option(600.0, "seconds that the head waits for nodes, and a node for its head")
    join_token_file: str | None = option(
        None,
        "file with the secret that all nodes share; default: SHARDLINE_JOIN_TOKEN, else "
        "~/.config/shardline/join-token, which the head writes at its first start",
    )

    def __post_init__(self) -> None:
        if self.nnodes < 1:
            raise ValueError(f"nnodes must be at least 1, got {self.nnodes}")
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"node_rank must be from 0 to nnodes - 1 = {self.nnodes - 1}, got {self.node_rank}")
        if self.nnodes > 1 and self.data_parallel_address is not None:
            raise ValueError("nnodes shares replicas out evenly; with data_parallel_address leave nnodes out")
        if self.nnodes > 1 and self.master_addr is None:
            raise ValueError("several nodes need --master-addr: the head's address, for example --master-addr 10.0.0.1")
        if self.nnodes == 1 and self.data_parallel_address is None and self.is_headless:
            raise ValueError(
                "a headless node needs its head: --nnodes, --node-rank and --master-addr, or --data-parallel-address"
            )
        if (
            self.is_headless
            and self.nnodes == 1
            and self.data_parallel_start_rank < 1
            and not self.data_parallel_size_local
        ):
            raise ValueError("a headless node needs --data-parallel-size-local and --data-parallel-start-rank")
        for name in ("master_port", "data_parallel_rpc_port"):
            if not 0 < getattr(self, name) < 65536:
                raise ValueError(f"{name} must be from 1 to 65535, got {getattr(self, name)}")
        if not self.join_timeout > 0:
            raise ValueError(f"join_timeout must be above 0 seconds, got {self.join_timeout}")

    @property
    def has_nodes(self) -> bool:
        """Whether there are other nodes."""
        return self.nnodes > 1 or self.data_parallel_address is not None

    @property
    def is_headless(self) -> bool:
        """Whether this process runs ranks for a head on another node."""
        return self.headless or self.node_rank > 0

    @property
    def head_address(self) -> str:
        """The address of the head, as the user wrote it."""
        return self.data_parallel_address or self.master_addr or ""

    @property
    def head_port(self) -> int:
        """The port of the head."""
        return self.data_parallel_rpc_port if self.data_parallel_address is not None else self.master_port

    def num_local_replicas(self, data_parallel_size: int) -> int:
        """The replicas of this node if nodes say how many they run; 0: they share them out evenly."""
        if self.data_parallel_address is None:
            return 0
        return data_parallel_size if self.data_parallel_size_local is None else self.data_parallel_size_local
