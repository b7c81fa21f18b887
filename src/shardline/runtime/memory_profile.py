"""The largest step that a rank may be given. Running it measures the memory that a device needs beside the KV cache."""

from __future__ import annotations

from shardline.deployment.deployment import Deployment
from shardline.messages.step import RankStep, SequenceStart, SequenceStep, StepPlan
from shardline.models.partition import split_dim
from shardline.sampling_params import SamplingParams

PROFILE_STEP_ID = -1


def largest_step(deployment: Deployment) -> RankStep:
    """A step of max_num_batched_tokens tokens that samples as many as a step may. All are sampled with penalties and
    with log-probabilities, which need a copy of the logits from before the penalties.

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
    return RankStep(StepPlan(PROFILE_STEP_ID, starts, steps, []), (num_tokens,) * replicas, (num_seqs,) * replicas)
