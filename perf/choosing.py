"""What choosing a replica costs: `python perf/choosing.py`.

A server's front asks its router for each request. The time of a choice by each policy, less that of hashing the blocks
of the prompt alone, with replicas that have seen many prompts; medians of several rounds, and the spread. Aim: at most
50 us.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

from shardline.routing.policies import policy_names
from shardline.routing.policies.base import ReplicaLoad
from shardline.routing.router import Router, hash_chunks

ROUNDS, CHOICES = 9, 300


def microseconds(act: Callable[[list[int]], object], prompts: list[list[int]]) -> list[float]:
    """The time for each prompt, in several rounds."""
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for prompt in prompts:
            act(prompt)
        found.append((time.perf_counter() - began) / len(prompts) * 1e6)
    return found


def make_prompts(tokens: int, number: int, dice: random.Random) -> list[list[int]]:
    """Prompts of which the first half is one of ten."""
    beginnings = [[dice.randrange(50_000) for _ in range(tokens // 2)] for _ in range(10)]
    return [
        dice.choice(beginnings) + [dice.randrange(50_000) for _ in range(tokens - tokens // 2)] for _ in range(number)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4000, help="of a prompt")
    args = parser.parse_args()
    dice = random.Random(1)
    prompts = make_prompts(args.tokens, CHOICES, dice)
    loads = [ReplicaLoad(dice.randrange(50), 0, index, 256) for index in range(args.replicas)]
    hashing = microseconds(lambda prompt: hash_chunks(prompt, ""), prompts)
    print(f"{args.replicas} replicas, prompts of {args.tokens} tokens; hashing {statistics.median(hashing):.1f} us")
    for policy in policy_names():
        router = Router(policy)
        for index in range(args.replicas):
            for _ in range(20):
                router.paces.add(index, 1, dice.randrange(9), dice.random())
        for prompt in make_prompts(args.tokens, 2000, dice):
            router.decide(prompt, "", loads)
        base = statistics.median(hashing) if router.uses_prefix else 0.0
        found = [one - base for one in microseconds(lambda prompt: router.decide(prompt, "", loads), prompts)]  # noqa: B023
        print(f"{policy:14} adds {statistics.median(found):6.1f} us ({min(found):.1f} to {max(found):.1f})")


if __name__ == "__main__":
    main()
