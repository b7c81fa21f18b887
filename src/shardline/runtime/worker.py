"""A worker owns one rank: load its part of the model, hold its part of the KV cache, run steps."""

from __future__ import annotations

import os
import platform
import socket
import time

import torch
from tqdm import tqdm

from shardline import _cpu, env
from shardline.models.sizes import weight_bytes
from shardline.runtime.decoder import DecoderStage
from shardline.runtime.layers.context import LayerContext
from shardline.runtime.layers.kv_pages import KVPages
from shardline.runtime.loader.weights import open_weights
from shardline.runtime.messages import RankReport
from shardline.runtime.parallel.groups import RankGroups
from shardline.runtime.quantization.base import quantization
from shardline.runtime.runner import Runner
from shardline.runtime.sampling.sampler import Sampler
from shardline.runtime.setup import ReplicaSetup
from shardline.types import StepPlan, StepResult

_PROGRESS_BYTES = 256 << 20
"""Smaller models load faster than a progress bar can be read."""


class Worker:
    """One rank of a replica, on the CPU."""

    def __init__(self, setup: ReplicaSetup, groups: RankGroups) -> None:
        self._setup = setup
        self._groups = groups
        self._dtype: torch.dtype = getattr(torch, setup.dtype)
        self._runner: Runner | None = None
        self._stage: DecoderStage | None = None

    def load(self) -> RankReport:
        """Load this rank's weights, allocate its KV cache, and say what it holds.

        Raises:
            ValueError: the checkpoint is at fault.
        """
        started = time.perf_counter()
        setup, place = self._setup, self._groups.place
        threads = setup.config.parallel.cpu_threads
        assert threads is not None
        # Our kernels have a pool of their own; a second one would fight it for the cores.
        torch.set_num_threads(1)
        _cpu.set_num_threads(threads)
        if (isa := env.force_isa()) is not None:
            _cpu.set_isa(isa)
        stage, weight_bytes = self._load_stage()
        self._stage = stage
        kv_bytes = self._allocate_cache(stage)
        sampler = Sampler(stage.lm_head.spans, self._groups.tensor) if stage.lm_head is not None else None
        self._runner = Runner(
            stage,
            self._groups,
            sampler,
            hidden_size=setup.spec.hidden_size,
            dtype=self._dtype,
            block_size=setup.config.cache.block_size,
            max_model_len=setup.max_model_len,
            num_kv_groups=len(setup.groups),
        )
        return RankReport(
            rank=place.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            device="CPU",
            isa=f"{platform.machine()}-{_cpu.isa()}",
            threads=threads,
            weight_bytes=weight_bytes,
            kv_bytes=kv_bytes,
            load_seconds=time.perf_counter() - started,
        )

    @property
    def stage(self) -> DecoderStage:
        """The layers, once they are loaded."""
        assert self._stage is not None
        return self._stage

    def run(self, plan: StepPlan) -> StepResult | None:
        """Run one step; see Runner.run."""
        assert self._runner is not None
        return self._runner.run(plan)

    def _load_stage(self) -> tuple[DecoderStage, int]:
        setup, place = self._setup, self._groups.place
        layers = setup.stages[place.pp_rank]
        expected = weight_bytes(setup.spec, place, setup.stages, setup.dtype, setup.numerics, setup.quantization)
        quiet = place.rank != 0 or expected < _PROGRESS_BYTES
        loaded = 0
        with tqdm(total=expected, unit="B", unit_scale=True, desc="loading weights", disable=quiet) as bar:

            def count(num_bytes: int) -> None:
                nonlocal loaded
                loaded += num_bytes
                bar.update(num_bytes)

            context = LayerContext(
                spec=setup.spec,
                group=self._groups.tensor,
                numerics=setup.numerics,
                dtype=self._dtype,
                max_model_len=setup.max_model_len,
                quantization=quantization(setup.quantization),
                weights=open_weights(setup.files, setup.spec, setup.config.model),
                on_loaded=count,
            )
            return DecoderStage(context, layers), loaded

    def _allocate_cache(self, stage: DecoderStage) -> int:
        """Give every layer its pages: slot d of the pool serves the d-th layer that this stage has of each group."""
        setup = self._setup
        layers = setup.stages[self._groups.place.pp_rank]
        block_size = setup.config.cache.block_size
        dtype: torch.dtype = getattr(torch, setup.kv_dtype)
        pools: list[KVPages] = []
        for group in setup.groups:
            mine = [index for index in group.layers if layers.start <= index < layers.stop]
            for depth, index in enumerate(mine):
                attention = stage.layers[index - layers.start].attention
                head_dim = setup.spec.layers[index].attention.head_dim
                if depth == len(pools):
                    shape = (setup.num_blocks, attention.num_kv_heads, block_size, head_dim)
                    pools.append(KVPages.allocate(shape, dtype))
                assert pools[depth].keys.shape[1::2] == (attention.num_kv_heads, head_dim), "one shape per pool"
                attention.bind_cache(pools[depth])
        return sum(pool.num_bytes for pool in pools)
