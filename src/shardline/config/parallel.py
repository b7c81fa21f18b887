"""How a model is split over ranks, and what runs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardline.config.experts import NO_BALANCING, ExpertBalancing, parse_balancing
from shardline.config.fields import option

_LONGEST_STEP = 86400.0


@dataclass(frozen=True)
class ParallelConfig:
    """How a model is split over ranks."""

    tensor_parallel_size: int = option(1, "ranks that share each layer", aliases=("tp",))
    pipeline_parallel_size: int = option(1, "stages of consecutive layers", aliases=("pp",))
    data_parallel_size: int = option(1, "replicas behind one endpoint", aliases=("dp",))
    context_parallel_size: int = option(
        1,
        "ranks that share one request's KV cache, and each layer's weights with the tensor-parallel ranks",
        aliases=("cp", "prefill-context-parallel-size", "pcp"),
    )
    decode_context_parallel_size: int = option(
        1,
        "as in vLLM: so many of the --tensor-parallel-size ranks share one request's KV cache; -tp 4 -dcp 2 is -tp 2 "
        "-cp 2",
        aliases=("dcp",),
    )
    router_policy: str = option(
        "least_work",
        "which replica runs a request; least_work: the one that has least to compute before the first token; kv_aware: "
        "the same by what each cache has; round_robin: each in turn; least_loaded: the one with the fewest requests; "
        "prefix_hash: equal beginnings of prompts go to one replica; cache_aware: the one whose prefix cache has "
        "most of the prompt, until it is saturated; power_of_two: the better one of two that are drawn",
        choices=("cache_aware", "kv_aware", "least_loaded", "least_work", "power_of_two", "prefix_hash", "round_robin"),
    )
    enable_expert_parallel: bool = option(False, "whole experts per rank instead of a slice of each", aliases=("ep",))
    enable_eplb: bool = option(False, "whole experts move between ranks, so that all have as much to do")
    eplb_config: str | None = option(
        None,
        "how experts move, as a JSON object with window_size, step_interval (in steps), num_redundant_experts and "
        "log_balancedness",
    )
    pipeline_stages: str | None = option(None, "layers per stage, for example 10,12,10; default: balanced by cost")
    distributed_executor_backend: str = option(
        "auto",
        "auto: uni for one rank, mp for several; threads: ranks as threads of one process; ray: processes on the nodes "
        "of a Ray cluster, which is joined (RAY_ADDRESS, or ray start on this host) or started",
        choices=("auto", "uni", "mp", "threads", "ray"),
    )
    device: str = option(
        "auto",
        "where ranks compute; auto: cuda if there is a GPU; cuda is also what torch calls AMD's GPUs",
        choices=("auto", "cpu", "cuda", "xpu", "mps"),
    )
    kernels: str = option(
        "auto",
        "what ranks compute with; auto: the device's own kernels if it has any, on GPUs those that are proved there; "
        "triton: the same, and a kernel that is not proved ends the start; torch: plain torch operations, which run "
        "every model on every device of torch, more slowly",
        choices=("auto", "triton", "torch"),
    )
    collectives: str = option(
        "auto",
        "how ranks exchange tensors; auto: shm between CPU ranks (sockets where they are on several hosts), nccl "
        "between GPUs (small gathers use symmetric memory if NVLink connects the GPUs)",
        choices=("auto", "shm", "gloo", "nccl"),
    )
    numerics: str = option(
        "exact",
        "exact: the same answer in every layout; fast: partial sums cross ranks, so answers may differ between layouts",
        choices=("exact", "fast"),
    )
    disable_nccl_for_dp_synchronization: bool = option(
        False, "accepted for compatibility: no effect, since replicas synchronise over sockets, never over NCCL"
    )
    step_timeout: float | None = option(
        None,
        "seconds within which some rank must finish a kernel or an exchange, and an idle rank must answer; an engine "
        "that is stalled for longer is ended; default: 10, and 300 on GPUs, where a step may compile kernels",
    )
    on_failure: str = option(
        "restart",
        "what follows the failure of a replica; restart: it starts again, and its requests go on where they were, on "
        "another replica if there is one; exit: the server ends with code 1",
        choices=("restart", "exit"),
    )
    max_restarts: int = option(5, "restarts of a replica within five minutes, after which it stays down")
    cpu_threads: int | None = option(None, "threads per rank; default: this process's cores divided by its ranks")

    @property
    def expert_balancing(self) -> ExpertBalancing:
        """`eplb_config` as fields.

        Raises:
            ValueError: it cannot be read, or experts are not whole.
        """
        if not self.enable_eplb:
            if self.eplb_config is not None:
                raise ValueError("eplb_config needs enable_eplb")
            return NO_BALANCING
        if not self.enable_expert_parallel:
            raise ValueError("enable_eplb moves whole experts between ranks, and needs enable_expert_parallel")
        return parse_balancing(self.eplb_config)

    @property
    def needs_whole_experts(self) -> bool:
        """Whether no other placement of experts does what is asked."""
        return self.enable_eplb

    @property
    def keeps_experts(self) -> bool:
        """Whether a rank has the same experts all the time, and computes them for its own replica only."""
        return not self.enable_eplb and not (self.enable_expert_parallel and self.data_parallel_size > 1)

    def divided(self, sizes: Mapping[str, int], *, whole_experts: bool) -> ParallelConfig:
        """The same with these sizes, by the names of the options. Only whole experts move."""
        moving = {} if whole_experts else {"enable_eplb": False, "eplb_config": None}
        return dataclasses.replace(self, enable_expert_parallel=whole_experts, **sizes, **moving)  # type: ignore[arg-type]

    @property
    def sharing(self) -> int:
        """Ranks of a stage that share each layer."""
        return self.tensor_parallel_size * self.context_parallel_size

    @property
    def lockstep(self) -> int:
        """Replicas that step together in one engine because their ranks share experts; 1: each has its own engine."""
        return self.data_parallel_size if self.enable_expert_parallel else 1

    @property
    def num_engines(self) -> int:
        """Number of engines. Each runs and fails on its own."""
        return self.data_parallel_size // self.lockstep


def divide_tensor_ranks(options: dict[str, Any]) -> None:
    """Replace vLLM's decode_context_parallel_size, which adds no ranks, by the sizes that it means.

    Raises:
        ValueError: it does not divide tensor_parallel_size, or context_parallel_size is set too.
    """
    size, tensor = options.pop("decode_context_parallel_size", 1), options.get("tensor_parallel_size", 1)
    if size == 1:
        return
    if not isinstance(size, int) or size < 1 or not isinstance(tensor, int) or tensor % size:
        raise ValueError(
            f"decode_context_parallel_size {size} must divide tensor_parallel_size, which is {tensor}; "
            "context_parallel_size adds ranks of its own"
        )
    if options.get("context_parallel_size", 1) != 1:
        raise ValueError("decode_context_parallel_size and context_parallel_size say the same; leave one of them out")
    options |= {"tensor_parallel_size": tensor // size, "context_parallel_size": size}


def check_parallel(parallel: ParallelConfig) -> None:
    """Check values together.

    Raises:
        ValueError: they do not fit each other, or one is out of its range.
    """
    _ = parallel.expert_balancing
    if parallel.step_timeout is not None and not 0 < parallel.step_timeout <= _LONGEST_STEP:
        raise ValueError(f"step_timeout must be in (0, {_LONGEST_STEP}] seconds, got {parallel.step_timeout}")
