"""The largest step that a rank may be given: running it measures what a device needs beside the KV cache."""

from __future__ import annotations

from shardline.models.partition import split_dim
from shardline.runtime.setup import ReplicaSetup
from shardline.types import RankStep, SamplingParams, SequenceStart, SequenceStep, StepPlan

PROFILE_STEP_ID = -1


def largest_step(setup: ReplicaSetup) -> RankStep:
    """max_num_batched_tokens tokens of as many sequences as may run, all of which are sampled, with penalties, and
    log-probabilities, which need the logits from before.

    Their blocks are all the null block: what attention reads and writes there is nobody's.
    """
    scheduler, block_size = setup.config.scheduler, setup.config.cache.block_size
    num_seqs = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    num_tokens = min(scheduler.max_num_batched_tokens, num_seqs * setup.max_model_len)
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=0, frequency_penalty=0.1, logprobs=1)
    starts, steps = [], []
    for seq_id, span in enumerate(split_dim(num_tokens, num_seqs)):
        token_ids = [index % setup.spec.vocab_size for index in range(span.start, span.stop)]
        starts.append(SequenceStart(seq_id, token_ids, span.size, sampling, 0, ()))
        blocks = [[0] * -(-span.size // block_size) for _ in setup.groups]
        steps.append(SequenceStep(seq_id, 0, span.size, blocks, -1, True))
    replicas = setup.grid.data
    return RankStep(StepPlan(PROFILE_STEP_ID, starts, steps, []), (num_tokens,) * replicas, (num_seqs,) * replicas)
