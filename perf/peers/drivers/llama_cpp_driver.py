"""llama.cpp through its Python API, with a batch driver of our own: all sequences advance together.

The library has no scheduler, so this is the fastest driver that the API allows for these workloads: a context sized for
the batch, a KV stream per sequence, and a shared prefix that is computed once and copied to the others.
"""

from __future__ import annotations

import os
from pathlib import Path

import llama_cpp
import numpy as np
from protocol import Generate, refuse_other_than, serve

_MAX_BATCH = 2048
"""Tokens of one llama_decode. The other engines schedule as many at once."""

_CONTEXT_STEP = 256
"""llama.cpp rounds a sequence's share of the context up to this many tokens."""


class Sequences:
    """A context for `count` sequences of up to `length` tokens."""

    def __init__(self, model: llama_cpp.llama_model_p, count: int, length: int) -> None:
        self.count = count
        self.length = -(-length // _CONTEXT_STEP) * _CONTEXT_STEP
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = self.count * self.length
        params.n_seq_max = count
        params.n_batch = _MAX_BATCH
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp could not make a context of {count} x {self.length} tokens")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(_MAX_BATCH, 0, 1)

    def close(self) -> None:
        """Free the context and the batch."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)

    def clear(self) -> None:
        """Forget all tokens."""
        llama_cpp.llama_memory_clear(self._memory, False)

    def copy_first_to_others(self) -> None:
        """Copy the content of the first sequence to all others."""
        for sequence in range(1, self.count):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)

    def advance(self, tokens: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Compute (sequence, position, token id, is the next token wanted); returns the likeliest next by sequence."""
        following: dict[int, int] = {}
        for start in range(0, len(tokens), _MAX_BATCH):
            part = tokens[start : start + _MAX_BATCH]
            batch = self._batch
            batch.n_tokens = len(part)
            for i, (sequence, position, token, wanted) in enumerate(part):
                batch.token[i] = token
                batch.pos[i] = position
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = sequence
                batch.logits[i] = wanted
            if (code := llama_cpp.llama_decode(self._context, batch)) != 0:
                raise RuntimeError(f"llama_decode of {len(part)} tokens failed with {code}")
            for i, (sequence, _, _, wanted) in enumerate(part):
                if wanted:
                    logits = llama_cpp.llama_get_logits_ith(self._context, i)
                    following[sequence] = int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
        return following


def shared_length(prompts: list[list[int]]) -> int:
    """Number of leading tokens that all prompts share. At least one token of each prompt is left out."""
    if len(prompts) == 1:
        return 0
    # A prefix that the smallest and the greatest prompt share is shared by all.
    pairs = zip(min(prompts)[:-1], max(prompts)[:-1], strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(map(len, prompts)) - 1)


def run(sequences: Sequences, prompts: list[list[int]], output_len: int) -> list[list[int]]:
    """Greedy continuations of the prompts."""
    sequences.clear()
    shared = shared_length(prompts)
    if shared:
        sequences.advance([(0, position, token, False) for position, token in enumerate(prompts[0][:shared])])
        sequences.copy_first_to_others()
    tokens = [
        (sequence, position, prompt[position], position == len(prompt) - 1)
        for sequence, prompt in enumerate(prompts)
        for position in range(shared, len(prompt))
    ]
    outputs: list[list[int]] = [[] for _ in prompts]
    for step in range(output_len):
        following = sequences.advance(tokens)
        for sequence, token in following.items():
            outputs[sequence].append(token)
        tokens = [(s, len(prompts[s]) + step, token, True) for s, token in following.items()]
    return outputs


def load(folder: str, precision: str) -> Generate:
    """Load bf16, int8 (Q8_0) or int4 (Q4_0) from the file of llama_cpp_convert.py, or with "file" the file `folder`."""
    refuse_other_than(precision, ["file", "bf16", "int8", "int4"])
    path = Path(folder)
    if precision != "file":
        from llama_cpp_convert import gguf_path

        path = gguf_path(folder, precision)
    if not path.exists():
        raise SystemExit(f"no {path}; write it with drivers/llama_cpp_convert.py {folder} {precision}")
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp could not load {path}")
    sequences: Sequences | None = None

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        nonlocal sequences
        longest = max(map(len, prompts)) + output_len
        # The context has exactly this shape, so attention reads only the batch, and no more memory is reserved.
        if sequences is None or sequences.count != len(prompts) or not 0 <= sequences.length - longest < _CONTEXT_STEP:
            if sequences is not None:
                sequences.close()
            sequences = Sequences(model, len(prompts), longest)
        return run(sequences, prompts, output_len)

    return generate


if __name__ == "__main__":
    serve(load, "llama-cpp-python")
