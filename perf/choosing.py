"""What choosing a replica costs: `python perf/choosing.py`.

A server's front asks its router for each request. The processor's time for a choice by each policy, less that of
hashing the blocks of the prompt alone (for `kv_aware` in two sizes), with replicas that have seen many prompts, and say
which blocks they have; medians of several rounds in turns, and the spread. Aim: at most 50 us.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

from shardline.messages.kv_events import BlockStored
from shardline.routing.policies import policy_names
from shardline.routing.policies.base import ReplicaLoad
from shardline.routing.router import Router, hash_chunks

ROUNDS, CHOICES, BLOCK = 15, 300, 16


def microseconds(act: Callable[[list[int]], object], prompts: list[list[int]]) -> float:
    """The mean time for a prompt. Other programs take none of it."""
    began = time.thread_time()
    for prompt in prompts:
        act(prompt)
    return (time.thread_time() - began) / len(prompts) * 1e6


def make_prompts(tokens: int, number: int, dice: random.Random) -> list[list[int]]:
    """Prompts of which the first half is one of ten."""
    beginnings = [[dice.randrange(50_000) for _ in range(tokens // 2)] for _ in range(10)]
    return [
        dice.choice(beginnings) + [dice.randrange(50_000) for _ in range(tokens - tokens // 2)] for _ in range(number)
    ]


def hash_once(prompt: list[int]) -> object:
    """What all policies do that look at prompts."""
    return hash_chunks(prompt, "")


def hash_twice(prompt: list[int]) -> object:
    """What the caches of replicas hold is known in their blocks."""
    chain = 0
    for block in zip(*[iter(prompt)] * BLOCK, strict=False):
        chain = hash((chain, block))
    return hash_once(prompt)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4000, help="of a prompt")
    args = parser.parse_args()
    dice = random.Random(1)
    prompts = make_prompts(args.tokens, CHOICES, dice)
    loads = [ReplicaLoad(dice.randrange(50), 0, index, 256) for index in range(args.replicas)]
    print(f"{args.replicas} replicas, prompts of {args.tokens} tokens")
    for policy in policy_names():
        router = Router(policy)
        for index in range(args.replicas):
            for _ in range(20):
                router.paces.add(index, 1, dice.randrange(9), dice.random())
        for prompt in [*make_prompts(args.tokens, 400, dice), *prompts]:
            home = router.decide(prompt, "", loads).number
            if policy == "kv_aware":
                blocks = [tuple(prompt[start : start + BLOCK]) for start in range(0, len(prompt), BLOCK)]
                names: list[int | bytes] = [hash(tuple(blocks[: end + 1])) for end in range(len(blocks))]
                router.kv.apply(home, 0, [BlockStored(names, None, prompt, BLOCK, None, "GPU", None)])
        hash_all = {"kv_aware": hash_twice}.get(policy, hash_once) if router.uses_prefix else len
        hashing, choosing = [], []
        for _ in range(ROUNDS):
            hashing.append(microseconds(hash_all, prompts))
            choosing.append(microseconds(lambda prompt: router.decide(prompt, "", loads), prompts))  # noqa: B023
        base = statistics.median(hashing)
        found = [one - base for one in choosing]
        print(
            f"{policy:14} adds {statistics.median(found):6.1f} us ({min(found):.1f} to {max(found):.1f})"
            f" to the hashing's {base:.1f}"
        )


if __name__ == "__main__":
    main()
