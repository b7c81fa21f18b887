"""A worker owns one rank: load its part of the model, hold its part of the KV cache, run steps."""

from __future__ import annotations

import functools
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence, Set

import msgspec
import torch

from shardline.deployment.deployment import NO_OFFLOAD, Deployment, KVAllocation, MeasuredPool
from shardline.deployment.kv_budget import MemoryUse, fixed_allocation
from shardline.messages.step import RankStep, SequenceStart, SequenceStep, StepPlan
from shardline.messages.worker import RankReport
from shardline.models.kv_groups import KVGroup
from shardline.models.partition import split_dim
from shardline.models.sizes import choice_bytes
from shardline.runtime.decoder import DecoderStage
from shardline.runtime.expert_mover import ExpertMover
from shardline.runtime.features.adapters import RowAdapters
from shardline.runtime.features.base import Feature
from shardline.runtime.features.constraints import ConstraintRows
from shardline.runtime.features.digests import Digests
from shardline.runtime.features.draft_head import DraftHead, SentStates
from shardline.runtime.features.draft_model import DraftModel, draft_sizes
from shardline.runtime.features.drafts import Drafts
from shardline.runtime.features.finite import Finite, FiniteChecker
from shardline.runtime.features.pooling import Pooling
from shardline.runtime.features.prompt_embeds import PromptRows
from shardline.runtime.features.scores import RowScorer, Scores
from shardline.runtime.features.watermark import Watermark
from shardline.runtime.key_share import share_keys
from shardline.runtime.kv_store import KVStore
from shardline.runtime.layers.context import LayerLoader, StageContext, Streams
from shardline.runtime.layers.head import Head
from shardline.runtime.loader.adapters import AdaptedLinear, AdapterLoader
from shardline.runtime.loader.progress import LoadingLine
from shardline.runtime.loader.read_ahead import node_ranges, read_ahead
from shardline.runtime.loader.weights import open_weights
from shardline.runtime.machines.base import Backend, Counters, Forward, Replay, Share, StepSizes
from shardline.runtime.parallel.collectives import Collectives, SingleRank
from shardline.runtime.parallel.groups import RankGroups
from shardline.runtime.runner import Runner
from shardline.runtime.sampling.sampler import Sampler
from shardline.runtime.sequences import SequenceTable
from shardline.runtime.stage_builder import build_stage
from shardline.runtime.tiers import open_tier
from shardline.sampling_params import SamplingParams

_log = logging.getLogger(__name__)

_PROGRESS_BYTES = 256 << 20
"""Expected weight bytes below which no progress bar is shown, because loading is too short."""
_PROFILE_STEP_ID = -1

Agree = Callable[[MemoryUse | None], KVAllocation]
"""Takes what a rank has measured (None: nothing) and returns the size of the KV pool, the same on all ranks."""


class Worker:
    """One rank of a replica."""

    def __init__(
        self,
        deployment: Deployment,
        backend: Backend,
        groups: RankGroups,
        engine: int = 0,
        share: Share = lambda own: (own,),
    ) -> None:
        """`share`: see `base.Share`; the default is for a rank that is alone."""
        self._share = share
        self._deployment = deployment
        self._engine = engine
        self._backend = backend
        self._groups = groups
        self._runner: Runner | None = None
        self._stage: DecoderStage | None = None
        self._draft_stage: DecoderStage | None = None
        self._adapted: Sequence[AdaptedLinear] = ()
        """The linears that adapters can change."""
        self._special_slots: tuple[Set[int], Set[int]] = (frozenset(), frozenset())
        """See `RowAdapters`."""
        self._head: Head | None = None
        self._draft: DraftModel | None = None
        self._kv_store: KVStore | None = None
        self._expert_load: Counters | None = None
        self._finite_checker = FiniteChecker(groups.place.rank) if deployment.check_finite else None
        context = groups["context"]
        self._sizes = StepSizes(
            max_seqs=deployment.limits.max_samples,
            max_blocks=deployment.cache.max_blocks,
            num_kv_groups=len(deployment.cache.groups),
            block_size=deployment.cache.block_size,
            hidden_size=deployment.spec.hidden_size,
            dtype=getattr(torch, deployment.dtype),
            keeps_states=deployment.spec.keeps_states,
            share=share_keys(deployment, context.rank, context.size) if context.size > 1 else None,
        )

    def load(self, agree: Agree | None = None) -> RankReport:
        """Load this rank's weights, allocate its KV cache, and report what it holds.

        `agree` returns the size of the KV pool, given this rank's measurement if ranks measure. Without `agree`, the
        pool has the size that the deployment has decided.

        Raises:
            ValueError: the checkpoint is at fault.
        """
        started = time.perf_counter()
        deployment, place, backend = self._deployment, self._groups.place, self._backend
        here = deployment.placements[self._engine][place.rank]
        fallbacks = backend.choose_kernels(deployment, here, self._share)
        held = deployment.weights[place.rank]
        weight_bytes = self._load_stages() - held.loaded_bytes + held.num_bytes
        stage = self.stage
        replay = self._make_replay(stage)
        memory = self._measure(stage, replay) if isinstance(deployment.cache.pool, MeasuredPool) else None
        allocation = fixed_allocation(deployment) if agree is None else agree(memory)
        assert allocation is not None
        self._kv_store = kv_store = self._allocate_cache(stage, allocation.num_blocks)
        kv_store.copier = open_tier(deployment, self._engine, place, kv_store.pages)
        with torch.inference_mode():
            replay.capture_steps()
        # What is recorded would neither be checked, nor wait for weights, nor choose tokens anew.
        forward = replay if self._finite_checker is None and not stage.never_recorded else stage.forward
        self._runner = self.make_runner(kv_store, forward)
        return RankReport(
            rank=place.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            device=backend.name,
            isa=backend.kernel_path,
            threads=backend.num_threads,
            weight_bytes=weight_bytes,
            kv_bytes=kv_store.num_bytes + (0 if self._draft is None else self._draft.num_bytes),
            load_seconds=time.perf_counter() - started,
            memory=memory,
            known_answer=backend.known_answer(),
            fallbacks=fallbacks,
        )

    @property
    def stage(self) -> DecoderStage:
        """The layers, once they are loaded."""
        assert self._stage is not None
        return self._stage

    @property
    def kv_store(self) -> KVStore:
        """The pages of the layers, once they are allocated."""
        assert self._kv_store is not None
        return self._kv_store

    @functools.cached_property
    def expert_mover(self) -> ExpertMover:
        """What brings experts to this rank."""
        return ExpertMover(self.stage.layers, self._deployment.stages[self._groups.place.pp_rank].start)

    @functools.cached_property
    def adapter_loader(self) -> AdapterLoader:
        """What brings adapters to this rank."""
        return AdapterLoader(self._adapted, self._deployment.spec, self._deployment.adapters)

    @property
    def runner(self) -> Runner:
        """What runs the steps, once the layers are loaded."""
        assert self._runner is not None
        return self._runner

    def _load_stages(self) -> int:
        """Load the weights of this rank's layers, and of the draft model if this rank has it; returns their bytes."""
        deployment, place, backend = self._deployment, self._groups.place, self._backend
        has_draft = deployment.draft is not None and deployment.draft.weights[place.rank].num_bytes
        drafting = deployment.of_draft if has_draft else None
        expected = deployment.weights[place.rank].loaded_bytes
        if (load := self._groups.expert_load).size:
            self._expert_load = backend.share_counters(torch.from_numpy(load))
        # One rank of a node reads for all of them, and one shows their progress: they load the same layers at a time.
        host = deployment.placements[self._engine][place.rank].host
        local = deployment.ranks_on(self._engine, host)
        on_node = sum(deployment.weights[rank].loaded_bytes for rank in local)
        is_first_engine = not any(deployment.ranks_on(engine, host) for engine in range(self._engine))
        quiet = place.rank != local[0] or not is_first_engine or on_node < _PROGRESS_BYTES
        ranges = node_ranges(deployment, self._engine, place.rank) if place.rank == local[0] else []
        if ranges and drafting is not None:
            ranges += node_ranges(drafting, self._engine, place.rank)
        loaded = 0
        with (
            LoadingLine(on_node, shown=not quiet) as line,
            read_ahead(ranges, lambda: loaded / max(1, expected)),
        ):

            def count(num_bytes: int) -> None:
                nonlocal loaded
                loaded += num_bytes
                line.count(num_bytes * on_node / max(1, expected))

            loader = self._make_loader(deployment, count)
            self._stage = stage = build_stage(loader, deployment.stages[place.pp_rank])
            stage.keep_memory(self._sizes.max_seqs)
            self._adapted, self._special_slots = loader.adapted, (loader.scaling_slots, loader.expert_slots)
            if drafting is not None:
                own_loader = self._make_loader(drafting, count, is_draft=True)
                self._draft_stage = build_stage(own_loader, drafting.stages[place.pp_rank])
                self._draft_stage.keep_memory(draft_sizes(deployment).max_seqs)
                if drafting.spec.head_input is not None:
                    assert stage.lm_head is not None
                    self._head = Head(own_loader, loader, stage.lm_head, stage.embedding)
        if loader.made_dense and place.tp_rank == 0:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(loader.made_dense.items()))
            _log.info("Packed weights that became dense, in %s: %s", deployment.dtype, kinds)
        backend.finish_loading(loader.loaded_products(deployment.limits.max_num_batched_tokens))
        return loaded

    def _make_loader(
        self, deployment: Deployment, on_loaded: Callable[[int], None], *, is_draft: bool = False
    ) -> LayerLoader:
        """Loads the layers of the model of a deployment; those of a draft model have one block table."""
        backend, storing = self._backend, range(len(deployment.spec.layers))
        streams: Streams = (None, None)
        if deployment.offload != NO_OFFLOAD:
            place = self._groups.place
            stage, weights = deployment.stages[place.pp_rank], deployment.weights[place.rank]
            streams = backend.stream_weights(deployment.offload, stage, weights)
        group, expert_group = self._groups["tensor"], self._groups["expert"]
        if is_draft:
            group = expert_group = self._draft_group
        context = StageContext(
            spec=deployment.spec,
            kv_groups=(KVGroup(tuple(storing), None),) if is_draft else deployment.cache.groups,
            backend=backend,
            group=group,
            expert_group=expert_group,
            numerics=deployment.numerics,
            dtype=self._sizes.dtype,
            max_model_len=deployment.max_model_len,
            finite_checker=None if is_draft else self._finite_checker,
            embeds=deployment.embeds,
            expert_parallel=deployment.expert_parallel,
            expert_load=self._expert_load.counts if self._expert_load is not None and not is_draft else None,
            adapters=deployment.adapters,
            context_group=SingleRank() if is_draft else self._groups["context"],
            stream=streams[0],
            expert_stream=streams[1],
            kept_layers=() if is_draft else deployment.kept_layers,
            moves_experts=deployment.expert_balancing.step_interval > 0,
            redundant_experts=deployment.expert_balancing.num_redundant_experts,
        )
        return LayerLoader(
            stage=context,
            source=open_weights(deployment, backend.device if backend.draws_dummy_weights else None),
            format=deployment.weight_format.open_format(),
            on_loaded=on_loaded,
        )

    def _make_replay(self, stage: DecoderStage) -> Replay:
        """The back end's replay of decode steps over the stage's forward pass."""
        # With whole experts, the host waits for the counts of each exchange, so it cannot be captured.
        waits = self._deployment.expert_parallel and self._groups["expert"].size > 1
        can_capture = self._groups["tensor"].is_capturable and not waits and self._finite_checker is None
        return self._backend.make_replay(stage.forward, self._sizes, can_capture=can_capture)

    @property
    def _draft_group(self) -> Collectives:
        """The ranks that share each layer of the draft model."""
        draft = self._deployment.draft
        assert draft is not None
        return SingleRank() if draft.num_sharing == 1 else self._groups["tensor"]

    def make_runner(self, kv_store: KVStore, forward: Forward, *, measures: bool = False) -> Runner:
        """What runs steps with the blocks of `kv_store`, and with this rank's features; `forward`: that of its stage,
        or a `Replay` of it. `measures`: there is no draft, and nothing is counted."""
        backend, stage, groups, sizes = self._backend, self.stage, self._groups, self._sizes
        sequences = SequenceTable(sizes.num_kv_groups, sizes.max_blocks, groups["context"].size)
        sampler: Sampler | None = None
        # The first ones read the results of rows, those after the drafts the results of sequences.
        features: list[Feature] = []
        if self._adapted:
            features.append(RowAdapters(sizes.max_seqs, backend.device, stage.lm_head, *self._special_slots))
        if stage.is_first:
            features.append(PromptRows(sizes.hidden_size, sizes.dtype, backend.device))
        if stage.lm_head is not None:
            spans, logprobs_mode = stage.lm_head.spans, self._deployment.logprobs_mode
            sampler = Sampler(backend.kernels, spans, groups["tensor"], backend.device, logprobs_mode)
            scorer = RowScorer(backend.kernels, spans, groups["tensor"], logprobs_mode)
            vocab_size, own_span = max(span.stop for span in spans), spans[groups["tensor"].rank]
            constraints = ConstraintRows(vocab_size, own_span, sizes.max_seqs)
            features += [Digests(backend.kernels), Drafts(), Scores(stage, scorer), constraints]
            features += [Watermark(key, vocab_size) for key in self._deployment.watermark]
        if stage.embeds_prompts:
            features.append(Pooling())
        if self._finite_checker is not None:
            features.append(Finite(self._finite_checker))
        if not measures and (self._draft_stage or stage.kept):
            features.append(self._make_draft(sequences))
        inputs, expert_load = backend.make_step_inputs(sequences, sizes), None if measures else self._expert_load
        return Runner(stage, groups, kv_store, forward, sizes, sequences, inputs, sampler, features, expert_load)

    def _make_draft(self, sequences: SequenceTable) -> Feature:
        """The draft model or head, once the pool is allocated, or what sends it hidden states."""
        deployment, backend, stage = self._deployment, self._backend, self._draft_stage
        num_blocks = self.kv_store.num_blocks * deployment.cache.context
        group, kept, previous = self._draft_group, self.stage.kept, self._groups.from_previous
        if stage is None:
            assert kept is not None
            assert self._groups.to_next is not None
            return SentStates(kept, previous, self._groups.to_next)
        if self._head is not None and kept is not None:
            self._draft = DraftHead(
                deployment, backend, stage, self._head, kept, group, num_blocks, sequences, previous
            )
        else:
            assert stage.lm_head is not None
            self._draft = DraftModel(deployment, backend, stage, stage.lm_head, num_blocks, sequences)
        return self._draft

    def _measure(self, stage: DecoderStage, replay: Replay) -> MemoryUse:
        """The memory that a step needs, measured by running the largest step on a cache of one block."""
        kv_store = self._allocate_cache(stage, 1)
        runner = self.make_runner(kv_store, stage.forward, measures=True)
        step = largest_step(self._deployment)
        with torch.inference_mode():
            use = self._backend.measure_step(lambda: runner.run_step(step), replay)
        # The sequences of this step are short, so no token is chosen.
        chosen = choice_bytes(self._deployment.spec, self._deployment.limits.max_num_batched_tokens)
        use = msgspec.structs.replace(use, step=use.step + chosen)
        if self._expert_load is not None:
            self._expert_load.counts.zero_()
        return use

    def _allocate_cache(self, stage: DecoderStage, num_blocks: int) -> KVStore:
        """Give the layers a KV pool."""
        kv_store = KVStore(
            num_blocks // self._groups["context"].size, self._deployment.cache, self._backend.pages_empty
        )
        kv_store.bind_layers(stage.layers, self._deployment.stages[self._groups.place.pp_rank], self._groups)
        return kv_store


def largest_step(deployment: Deployment) -> RankStep:
    """The largest step that a rank may be given: of max_num_batched_tokens tokens, with as many sampled ones as a step
    may have. They have penalties and log-probabilities, which need a copy of the logits from before the penalties.

    All their blocks are the null block, which no sequence uses, so attention may read and write there.
    """
    limits, cache = deployment.limits, deployment.cache
    num_seqs = min(limits.max_samples, limits.max_num_batched_tokens)
    num_tokens = min(limits.max_num_batched_tokens, num_seqs * deployment.max_model_len)
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=0, frequency_penalty=0.1, logprobs=1)
    starts, steps = [], []
    for seq_id, span in enumerate(split_dim(num_tokens, num_seqs)):
        token_ids = [index % deployment.spec.vocab_size for index in range(span.start, span.stop)]
        starts.append(SequenceStart(seq_id, token_ids, span.size, sampling, 0, ()))
        blocks = [[0] * -(-span.size // cache.block_size) for _ in cache.groups]
        steps.append(SequenceStep(seq_id, 0, span.size, blocks, -1, True))
    replicas = deployment.grid.data
    return RankStep(StepPlan(_PROFILE_STEP_ID, starts, steps, []), (num_tokens,) * replicas, (num_seqs,) * replicas)
