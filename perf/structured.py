"""What grammars and prompt log probabilities cost: `python perf/structured.py`.

The model has Qwen2.5-0.5B's shape and random weights. Its tokenizer is a byte-level BPE that is made here, of the words
of Python's own library. Both sides of a comparison run in turns on one engine:

- steps of sequences whose outputs a JSON schema constrains, against the same steps without a schema;
- the time to the first token with a grammar that is warm, against the time without one;
- the prefill of a prompt whose log probabilities are reported, against one without.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import itertools
import json
import random
import re
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from shardline.api.async_llm import AsyncLLM
from shardline.config.engine import EngineConfig
from shardline.sampling_params import SamplingParams, StructuredOutputsParams
from shardline.structured.grammar import structured_grammar
from shardline.structured.vocabulary import byte_alphabet

VOCAB_SIZE = 151_936
SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
SCHEMA = {
    "type": "array",
    "minItems": 40,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "score": {"type": "number"},
            "role": {"enum": ["reader", "writer", "owner"]},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,12}$"}, "maxItems": 3},
            "address": {
                "type": "object",
                "properties": {"street": {"type": "string", "maxLength": 40}, "zip": {"pattern": "^[0-9]{5}$"}},
                "required": ["street", "zip"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "age", "score", "role", "tags", "address"],
        "additionalProperties": False,
    },
}


def make_tokens(count: int) -> list[tuple[str, str | None]]:
    """Tokens in the byte alphabet, each with the token that it continues by one character; None: it is one byte."""
    alphabet = {byte: char for char, byte in byte_alphabet().items()}
    tokens: dict[str, str | None] = {alphabet[byte]: None for byte in range(256)}
    words: collections.Counter[bytes] = collections.Counter()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        words.update(re.findall(rb" ?\w+| ?[^\w\s]+|\s+", path.read_bytes()))
        if len(words) > 4 * count:
            break
    prefixes: collections.Counter[str] = collections.Counter()
    for word, times in words.items():
        text = "".join(alphabet[byte] for byte in word[:24])
        for end in range(2, len(text) + 1):
            prefixes[text[:end]] += times
    # A prefix is at least as frequent as what it begins, and comes before it.
    for token, _ in sorted(prefixes.items(), key=lambda entry: (-entry[1], len(entry[0]))):
        if len(tokens) == count:
            break
        if token not in tokens:
            tokens[token] = token[:-1]
    return list(tokens.items())


def write_model(folder: Path) -> int:
    """Write a checkpoint without weights. Returns the number of tokens of its vocabulary."""
    special = ["<|pad|>", "<|begin|>", "<|end|>"]
    tokens = make_tokens(VOCAB_SIZE - len(special))
    vocabulary = {token: index for index, token in enumerate([*special, *(token for token, _ in tokens)])}
    marks = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": index, "content": content, **marks} for index, content in enumerate(special)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": [[before, token[-1]] for token, before in tokens if before is not None],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "bos_token": "<|begin|>"}))
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return len(vocabulary)


class Bench:
    """An engine, and requests whose times are measured. Prompts are random, so that none is in the prefix cache."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._rng = random.Random(0)
        self.grammar = structured_grammar(StructuredOutputsParams(json=SCHEMA))

    async def run(self, num_prompt: int, params: SamplingParams, grammar: str = "") -> list[float]:
        """The times of a request's outputs in seconds after it was sent."""
        prompt = [self._rng.randrange(1000, VOCAB_SIZE - 1000) for _ in range(num_prompt)]
        started = time.perf_counter()
        if grammar:
            await self._llm.grammars.check_grammar(grammar)
        stream = await self._llm.submit(prompt, params, grammar=grammar)
        times = [time.perf_counter() - started async for _ in stream]
        [output] = stream.output.outputs
        assert output.finish_reason == "length", f"an output ended early: {output.finish_reason} {output.error}"
        return times

    async def step_seconds(self, num_sequences: int, num_tokens: int, temperature: float, grammar: str) -> list[float]:
        """The times of the decode steps of sequences that run together."""
        runs = [
            self.run(
                16, SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=temperature, seed=n), grammar
            )
            for n in range(num_sequences)
        ]
        times = await asyncio.gather(*runs)
        # The first steps are prefills.
        first = times[0][len(times[0]) // 4 :]
        return [after - before for before, after in itertools.pairwise(first)]

    async def first_token(self, num_prompt: int, grammar: str = "", **params: Any) -> float:
        """Seconds to the first token of a request that runs alone."""
        [seconds] = await self.run(num_prompt, SamplingParams(max_tokens=1, ignore_eos=True, **params), grammar)
        return seconds


async def compare(name: str, aim: str, rounds: int, measure: Callable[[bool], Awaitable[float]]) -> None:
    """Measure both sides in turns, and print the medians in milliseconds and the ratios of the rounds."""
    pairs = [(1e3 * await measure(True), 1e3 * await measure(False)) for _ in range(rounds)]
    with_it, without = (statistics.median(side) for side in zip(*pairs, strict=True))
    extra = statistics.median(one - other for one, other in pairs)
    ratios = [one / other for one, other in pairs]
    ratio = f"{statistics.median(ratios):6.3f} [{min(ratios):.3f}-{max(ratios):.3f}]"
    print(f"{name:<34} {with_it:9.2f} {without:9.2f} {extra:+8.2f} {ratio}  {aim}", flush=True)


async def run_all(bench: Bench, args: argparse.Namespace) -> None:
    """Measure and print."""

    def steps(temperature: float) -> Callable[[bool], Awaitable[float]]:
        async def measure(constrained: bool) -> float:
            grammar = bench.grammar if constrained else ""
            return statistics.mean(await bench.step_seconds(args.sequences, args.tokens, temperature, grammar))

        return measure

    await bench.first_token(16, bench.grammar)  # makes the grammar warm
    print(f"{'ms':<34} {'with':>9} {'without':>9} {'extra':>8} {'ratio':>6}")
    for temperature in (0.0, 1.0):
        name = f"step, {args.sequences} sequences, T = {temperature:g}"
        await compare(name, "JSON schema, aim 1.05", args.rounds, steps(temperature))
    await compare(
        "first token, 16 tokens in",
        "warm grammar, aim +1 ms",
        8 * args.rounds,
        lambda side: bench.first_token(16, bench.grammar if side else ""),
    )
    await compare(
        f"first token, {args.prompt} tokens in",
        "prompt_logprobs, aim 1.67 (0.6 of the speed)",
        args.rounds,
        lambda side: bench.first_token(args.prompt, prompt_logprobs=1 if side else None),
    )


async def main() -> None:
    """Make the model, start the engine, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each sequence (default: 64)")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a scored prompt (default: 1024)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quantization", default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(f"vocabulary: {write_model(Path(folder)):,} tokens")
        options = {} if args.quantization is None else {"quantization": args.quantization}
        llm = AsyncLLM(EngineConfig.from_options(model=folder, load_format="dummy", max_num_seqs=64, **options))
        try:
            await llm.wait_ready()
            await run_all(Bench(llm), args)
        finally:
            await llm.close()


if __name__ == "__main__":
    asyncio.run(main())
