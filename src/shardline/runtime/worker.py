"""A worker owns one rank: load its part of the model, hold its part of the KV cache, run steps."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable

import torch
from tqdm import tqdm

from shardline import _cpu, env
from shardline.deployment.deployment import Deployment, KVAllocation, MeasuredPool
from shardline.deployment.kv_budget import fixed_allocation
from shardline.deployment.messages import MemoryUse, RankReport
from shardline.models.partition import split_dim
from shardline.runtime.cuda_graphs import CudaRecorder, GraphReplay, PaddedStep
from shardline.runtime.decoder import DecoderStage
from shardline.runtime.device import Device, DeviceCounters, open_device
from shardline.runtime.finite import FiniteWatch
from shardline.runtime.layers.context import LayerContext
from shardline.runtime.layers.kv_pages import CachePart
from shardline.runtime.loader.weights import open_weights
from shardline.runtime.memory_profile import largest_step, measure
from shardline.runtime.parallel.groups import RankGroups
from shardline.runtime.pending import PendingStep
from shardline.runtime.quantization.base import quantization
from shardline.runtime.replay import DecodeReplay, Forward
from shardline.runtime.reserve import weight_reserve
from shardline.runtime.runner import Runner
from shardline.runtime.sampling.sampler import Sampler
from shardline.types import RankStep, StepResult

_PROGRESS_BYTES = 256 << 20
"""Smaller models load faster than a progress bar can be read."""

Agree = Callable[[MemoryUse | None], KVAllocation]
"""What a rank has measured (None: nothing) -> the size of the KV pool, the same on all ranks."""


class Worker:
    """One rank of a replica, on the CPU or a GPU."""

    def __init__(self, deployment: Deployment, groups: RankGroups, engine: int = 0) -> None:
        """`engine`: which of the deployment's engines this rank belongs to."""
        self._deployment = deployment
        self._groups = groups
        self._engine = engine
        self._dtype: torch.dtype = getattr(torch, deployment.dtype)
        self._runner: Runner | None = None
        self._stage: DecoderStage | None = None
        self._expert_load: DeviceCounters | None = None
        self._watch = FiniteWatch(groups.place.rank) if deployment.check_finite else None

    def load(self, agree: Agree | None = None) -> RankReport:
        """Load this rank's weights, allocate its KV cache, and say what it holds.

        `agree` says how large the KV pool is; None: as the deployment has decided.

        Raises:
            ValueError: the checkpoint is at fault.
        """
        started = time.perf_counter()
        deployment, place = self._deployment, self._groups.place
        threads = deployment.placements[self._engine][place.rank].threads
        # Our kernels have a pool of their own; a second one would fight it for the cores.
        torch.set_num_threads(1)
        _cpu.set_num_threads(threads)
        if (isa := env.force_isa()) is not None:
            _cpu.set_isa(isa)
        device = open_device(deployment.device, place.rank)
        stage, weight_bytes = self._load_stage(device)
        self._stage = stage
        forward = self._replayed(stage, device)
        memory = None
        if isinstance(deployment.cache.pool, MeasuredPool):
            memory = self._measure(stage, forward, device)
        allocation = fixed_allocation(deployment) if agree is None else agree(memory)
        assert allocation is not None
        kv_bytes = self._allocate_cache(stage, device, allocation.num_blocks)
        if isinstance(forward, GraphReplay):
            with torch.inference_mode():
                forward.capture()
        self._runner = self._make_runner(stage, forward, device)
        return RankReport(
            rank=place.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            device=device.name,
            isa=device.kernel_path,
            threads=threads,
            weight_bytes=weight_bytes,
            kv_bytes=kv_bytes,
            load_seconds=time.perf_counter() - started,
            memory=memory,
        )

    @property
    def stage(self) -> DecoderStage:
        """The layers, once they are loaded."""
        assert self._stage is not None
        return self._stage

    def run(self, step: RankStep) -> StepResult | None:
        """Run one step; see Runner.run."""
        return self.launch(step).result()

    def launch(self, step: RankStep) -> PendingStep:
        """Begin one step; see Runner.launch."""
        assert self._runner is not None
        pending = self._runner.launch(step)
        if self._expert_load is not None:
            self._expert_load.publish()
        return pending

    def _load_stage(self, device: Device) -> tuple[DecoderStage, int]:
        deployment, place = self._deployment, self._groups.place
        layers = deployment.stages[place.pp_rank]
        expected = deployment.weights[place.rank].num_bytes
        if (load := self._groups.expert_load).size:
            self._expert_load = DeviceCounters(torch.from_numpy(load), device.torch)
        quiet = place.rank != 0 or expected < _PROGRESS_BYTES
        loaded = 0
        with tqdm(total=expected, unit="B", unit_scale=True, desc="loading weights", disable=quiet) as bar:

            def count(num_bytes: int) -> None:
                nonlocal loaded
                loaded += num_bytes
                bar.update(num_bytes)

            context = LayerContext(
                spec=deployment.spec,
                group=self._groups.tensor,
                experts=self._groups.experts,
                numerics=deployment.numerics,
                dtype=self._dtype,
                device=device.torch,
                max_model_len=deployment.max_model_len,
                quantization=quantization(deployment.weight_format.name),
                keeps_packed=deployment.keeps_packed,
                weights=open_weights(deployment, device.torch),
                watch=self._watch,
                on_loaded=count,
                expert_parallel=deployment.expert_parallel,
                expert_load=self._expert_load.on_device if self._expert_load is not None else None,
            )
            stage = DecoderStage(context, layers)
        weight_reserve.release()
        if not device.is_host:
            self._choose_products(device, context.product_shapes)
        return stage, loaded

    def _choose_products(self, device: Device, shapes: set[tuple[int, int]]) -> None:
        """Take the library's matrix products where they change no bit, or with fast numerics everywhere."""
        from shardline.runtime.ops.triton.library import use_library
        from shardline.runtime.ops.triton.library_trial import try_library

        deployment = self._deployment
        if deployment.numerics != "exact":
            use_library({}, always=True)
        elif deployment.weight_format.is_plain:
            assert device.memory is not None
            free, _ = device.memory.free_and_total()
            most_rows = deployment.limits.max_num_batched_tokens
            use_library(try_library(shapes, most_rows, self._dtype, device.torch, free))
            device.memory.release()

    def _make_runner(self, stage: DecoderStage, forward: Forward, device: Device) -> Runner:
        deployment, sampler = self._deployment, None
        if stage.lm_head is not None:
            sampler = Sampler(stage.lm_head.spans, self._groups.tensor, device.torch)
        return Runner(
            stage,
            self._groups,
            sampler,
            forward,
            hidden_size=deployment.spec.hidden_size,
            dtype=self._dtype,
            block_size=deployment.cache.block_size,
            max_blocks=deployment.cache.max_blocks,
            max_num_seqs=deployment.limits.max_num_seqs,
            num_kv_groups=len(deployment.cache.groups),
            watch=self._watch,
            device=device,
        )

    def _replayed(self, stage: DecoderStage, device: Device) -> Forward:
        """The stage's forward pass with decode steps replayed, in the device's way."""
        deployment, groups = self._deployment, self._groups
        if self._watch is not None:
            return stage.forward
        max_seqs = deployment.limits.max_num_seqs
        sizes = {
            "max_seqs": max_seqs,
            "max_blocks": deployment.cache.max_blocks,
            "num_kv_groups": len(deployment.cache.groups),
            "hidden_size": deployment.spec.hidden_size,
        }
        if device.is_host:
            return DecodeReplay(
                stage.forward, max_seqs=max_seqs, hidden_size=deployment.spec.hidden_size, dtype=self._dtype
            )
        if not groups.tensor.is_capturable or (deployment.expert_parallel and groups.experts.size > 1):
            return stage.forward  # whole experts: the host waits for what each rank is sent
        padded = PaddedStep(device.torch, dtype=self._dtype, **sizes)
        return GraphReplay(stage.forward, padded, max_seqs, CudaRecorder())

    def _measure(self, stage: DecoderStage, forward: Forward, device: Device) -> MemoryUse:
        """What a step needs, found by running the largest on a cache of one block."""
        assert device.memory is not None, "only what has memory of its own is measured"
        self._allocate_cache(stage, device, 1)
        runner = self._make_runner(stage, stage.forward, device)
        step = largest_step(self._deployment)
        with torch.inference_mode():
            replay = forward if isinstance(forward, GraphReplay) else None
            use = measure(device.memory, lambda: runner.run(step), replay)
        if self._expert_load is not None:
            self._expert_load.on_device.zero_()
        return use

    def _allocate_cache(self, stage: DecoderStage, device: Device, num_blocks: int) -> int:
        """Give every layer its pages: slot d of the pool serves the d-th layer that this stage has of each group.

        Returns this rank's bytes; of a pool that it shares, an even part.
        """
        deployment, cache = self._deployment, self._deployment.cache
        layers = deployment.stages[self._groups.place.pp_rank]
        dtype: torch.dtype = getattr(torch, cache.dtype)
        pools: list[tuple[torch.Tensor, ...]] = []
        pool_parts: list[tuple[CachePart, ...]] = []
        total = 0
        for group in cache.groups:
            mine = [index for index in group.layers if layers.start <= index < layers.stop]
            for depth, index in enumerate(mine):
                attention = stage.layers[index - layers.start].attention
                parts = attention.cache_parts(num_blocks, cache.block_size, dtype)
                if depth == len(pools):
                    pages = []
                    for part in parts:
                        pages.append(self._pages(part, total, device))
                        total += part.num_bytes
                    pools.append(tuple(pages))
                    pool_parts.append(parts)
                assert pool_parts[depth] == parts, "one shape per pool"
                attention.bind_cache(*pools[depth])
        if self._groups.kv_pool is None:
            return total
        assert total == len(self._groups.kv_pool), "the segment was cut for this pool"
        return split_dim(total, self._groups.tensor.size)[self._groups.tensor.rank].size

    def _pages(self, part: CachePart, offset: int, device: Device) -> torch.Tensor:
        """An uninitialised tensor, at `offset` in a shared pool; pages that nobody touches take no memory."""
        shared = self._groups.kv_pool
        if shared is None:
            return torch.empty(part.shape, dtype=part.dtype, device=device.torch)
        count = math.prod(part.shape)
        return torch.frombuffer(shared, dtype=part.dtype, count=count, offset=offset).view(part.shape)
