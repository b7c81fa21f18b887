"""A model of twice the memory: `python -m perf.peers.memory_limit ours|llama.cpp`, as root, for one round.

A GGUF file of 1.1 B random parameters in 16 bits (2.2 GB) is made in the folder in which this runs, unless it is there.
The process is in a memory cgroup (version 1) of 1.6 GiB. Shardline streams the layers that do not fit
(`--offload-to` alone); llama.cpp maps the file, and the system reads pages as they are missed. Printed is how many
tokens a second 32 sequences decode. `llama.cpp` needs `xllamacpp` and `httpx`, in an environment of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

FILE = Path("memory-limit.gguf")
LIMIT = 1.6
"""GiB"""
LAYERS, HIDDEN, INNER, VOCABULARY, HEADS, KV_HEADS = 22, 2048, 5632, 32000, 32, 4
PROMPT = list(range(300, 330))
FIRST_STEPS = 2


def write_model() -> None:
    """Write FILE."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(FILE, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCABULARY)
    words = [f"w{number}" for number in range(VOCABULARY - 259)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words])
    writer.add_token_scores([0.0] * 259 + [-float(number) for number in range(len(words))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(words))
    dice = np.random.default_rng(0)

    def add(name: str, rows: int, columns: int) -> None:
        values = dice.standard_normal((rows, columns), dtype=np.float32)
        writer.add_tensor(f"{name}.weight", (values * 0.02).astype(np.float16))

    ones = np.ones(HIDDEN, np.float32)
    add("token_embd", VOCABULARY, HIDDEN)
    writer.add_tensor("output_norm.weight", ones)
    add("output", VOCABULARY, HIDDEN)
    kv = KV_HEADS * HIDDEN // HEADS
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", ones)
        for name, rows in (("attn_q", HIDDEN), ("attn_k", kv), ("attn_v", kv), ("attn_output", HIDDEN)):
            add(f"blk.{layer}.{name}", rows, HIDDEN)
        add(f"blk.{layer}.ffn_gate", INNER, HIDDEN)
        add(f"blk.{layer}.ffn_up", INNER, HIDDEN)
        add(f"blk.{layer}.ffn_down", HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def limit_memory() -> None:
    """Put this process into a cgroup, and the file out of the page cache."""
    group = Path(f"/sys/fs/cgroup/memory/shardline-{os.getpid()}")
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(int(LIMIT * (1 << 30))))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    with FILE.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def shardline(batch: int, steps: int) -> float:
    """Seconds of a step."""
    from shardline import LLM, SamplingParams

    folder = Path("memory-limit-offloaded").absolute()
    llm = LLM(
        str(FILE.absolute()),
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=batch,
        kv_cache_memory="128MiB",
        enable_prefix_caching=False,
        offload_to=str(folder),
    )
    prompts: Any = [{"prompt_token_ids": [1, *PROMPT, 400 + number]} for number in range(batch)]

    def decode(steps: int) -> float:
        started = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - started

    decode(FIRST_STEPS)  # warms up
    return (decode(FIRST_STEPS + steps) - decode(FIRST_STEPS)) / steps


def llama_cpp(batch: int, steps: int) -> float:
    """The same with llama.cpp's server in this process, while all sequences decode."""
    import httpx
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(FILE)
    params.n_ctx, params.n_parallel, params.warmup = 256 * batch, batch, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
    server = xllamacpp.Server(params)

    times: list[list[float]] = [[] for _ in range(batch)]

    def ask(number: int) -> None:
        body = {"prompt": [1, *PROMPT, 400 + number], "n_predict": 2 * steps, "temperature": 0, "ignore_eos": True}
        body |= {"cache_prompt": False, "stream": True}
        with httpx.stream("POST", f"{server.listening_address}/completion", json=body, timeout=900) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    times[number].append(time.perf_counter())

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(batch)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begin, end = max(at[0] for at in times), min(at[-1] for at in times)
    counts = [sum(begin < moment <= end for moment in at) for at in times]
    return batch * (end - begin) / sum(counts)


def main() -> None:
    """Measure one engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines = {"ours": shardline, "llama.cpp": llama_cpp}
    parser.add_argument("engine", choices=engines)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    if not FILE.exists():
        write_model()
    limit_memory()
    each = engines[arguments.engine](arguments.batch, arguments.steps)
    print(f"{arguments.engine}: {arguments.batch / each:.1f} tokens/s, {each:.2f} s a step", flush=True)
    with contextlib.suppress(BrokenPipeError):
        os._exit(0)  # llama.cpp's threads do not end


if __name__ == "__main__":
    main()
