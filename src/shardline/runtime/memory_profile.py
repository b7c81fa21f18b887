"""How much of a GPU a rank needs beside its KV cache: measured, by running the largest step that it may be given."""

from __future__ import annotations

from collections.abc import Callable

from shardline.deployment.deployment import Deployment
from shardline.deployment.messages import MemoryUse
from shardline.models.partition import split_dim
from shardline.runtime.cuda_graphs import GraphReplay
from shardline.runtime.device import DeviceMemory
from shardline.types import RankStep, SamplingParams, SequenceStart, SequenceStep, StepPlan

PROFILE_STEP_ID = -1


def largest_step(deployment: Deployment) -> RankStep:
    """max_num_batched_tokens tokens of as many sequences as may run, all of which are sampled, with penalties, and
    log-probabilities, which need the logits from before.

    Their blocks are all the null block: what attention reads and writes there is nobody's.
    """
    limits, cache = deployment.limits, deployment.cache
    num_seqs = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    num_tokens = min(limits.max_num_batched_tokens, num_seqs * deployment.max_model_len)
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=0, frequency_penalty=0.1, logprobs=1)
    starts, steps = [], []
    for seq_id, span in enumerate(split_dim(num_tokens, num_seqs)):
        token_ids = [index % deployment.spec.vocab_size for index in range(span.start, span.stop)]
        starts.append(SequenceStart(seq_id, token_ids, span.size, sampling, 0, ()))
        blocks = [[0] * -(-span.size // cache.block_size) for _ in cache.groups]
        steps.append(SequenceStep(seq_id, 0, span.size, blocks, -1, True))
    replicas = deployment.grid.data
    return RankStep(StepPlan(PROFILE_STEP_ID, starts, steps, []), (num_tokens,) * replicas, (num_seqs,) * replicas)


def measure(memory: DeviceMemory, run_step: Callable[[], object], replay: GraphReplay | None) -> MemoryUse:
    """What a rank that holds its weights needs for `run_step`, and for the graphs of `replay`."""
    memory.release()
    held = memory.reserved()
    memory.reset_peak()
    run_step()
    step = memory.peak() - held
    memory.release()
    graphs = 0 if replay is None else graph_bytes(memory, replay)
    memory.release()
    free, total = memory.free_and_total()
    return MemoryUse(
        total=total, others=total - free - memory.reserved(), weights=memory.reserved(), step=step, graphs=graphs
    )


def graph_bytes(memory: DeviceMemory, replay: GraphReplay) -> int:
    """At most what capturing all sizes will take: the scratch of the size that needs most, which all share, every
    size's output, which stays, and what the driver keeps of a graph, for each as for the largest.

    Runs every size once, which compiles the kernels that capturing needs, and captures one.
    """
    scratch = outputs = 0
    for size in replay.sizes:
        memory.release()
        held = memory.reserved()
        memory.reset_peak()
        outputs += replay.run_padded(size).nbytes
        scratch = max(scratch, memory.peak() - held)
    memory.release()
    reserved, (free, _) = memory.reserved(), memory.free_and_total()
    trial = replay.record(replay.sizes[-1])
    grown = memory.reserved() - reserved
    driver = max(0, free - memory.free_and_total()[0] - grown)
    del trial
    replay.discard()
    return max(scratch, grown) + outputs + driver * len(replay.sizes)
