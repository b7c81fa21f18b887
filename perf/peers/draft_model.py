"""A draft model here and in llama.cpp: `python -m perf.peers.draft_model --llama-server FILE`.

Both have the pair of `perf/draft_ranks.py` in bf16, on all cores, and take turns with the same prompts, one after
another, with drafts of up to five guesses and without. llama.cpp's times are those that its server states for prompt
and answer, without HTTP; ours are those of `LLM.generate`. Prints the tokens/s of each, and the ratios with the least
and the most.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from perf.draft_ranks import OUTPUT_LEN, PROMPT_LEN, VOCAB_SIZE, acceptance, make_pair
from perf.peers.drivers.qwen2_gguf import write_bf16

from shardline import LLM, SamplingParams

NUM_GUESSES = 5


@contextmanager
def llama_server(program: Path, model: Path, draft: Path | None) -> Iterator[str]:
    """The URL of a server that has loaded a model, and a draft model."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    threads = str(len(os.sched_getaffinity(0)))
    command = [str(program), "-m", str(model), "--port", port, "-t", threads, "-c", "1024", "-np", "1"]
    if draft is not None:
        command += ["-md", str(draft), "-td", threads, "--spec-type", "draft-simple"]
        command += ["--spec-draft-n-max", str(NUM_GUESSES), "--spec-draft-p-min", "0"]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(600):
                if process.poll() is not None:
                    raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
                try:
                    urllib.request.urlopen(f"{url}/health").close()
                    break
                except OSError:
                    time.sleep(0.1)
            yield url
        finally:
            process.terminate()


def llama_generate(url: str, prompt: list[int]) -> tuple[float, dict[str, Any]]:
    """Seconds of one answer, and what the server says of it."""
    body = {"prompt": prompt, "n_predict": OUTPUT_LEN, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode())
    with urllib.request.urlopen(request) as answer:
        timings = json.load(answer)["timings"]
    assert timings["predicted_n"] == OUTPUT_LEN, timings
    return (timings["prompt_ms"] + timings["predicted_ms"]) / 1000, timings


def own_generate(llm: LLM, prompt: list[int]) -> float:
    """Seconds of one answer."""
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", type=Path, required=True, help="the program, built for this machine")
    parser.add_argument("--damping", type=float, default=0.04, help="see draft_ranks.py")
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    dice, accepted = random.Random(1), [0, 0]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        pair = make_pair(Path(name), asked.damping)
        files = [folder.with_suffix(".gguf") for folder in pair]
        for folder, file in zip(pair, files, strict=True):
            write_bf16(folder, file, with_tokens=True)
        usual: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory": "512MiB", "skip_tokenizer_init": True}
        drafting = {"model": str(pair[1]), "num_speculative_tokens": NUM_GUESSES}
        own = [stack.enter_context(closing(LLM(str(pair[0]), speculative_config=c, **usual))) for c in (None, drafting)]
        urls = [stack.enter_context(llama_server(asked.llama_server, files[0], draft)) for draft in (None, files[1])]

        def drafting_llama(prompt: list[int]) -> float:
            seconds, timings = llama_generate(urls[1], prompt)
            accepted[0] += timings["draft_n_accepted"]
            accepted[1] += timings["draft_n"]
            return seconds

        engines: dict[str, Callable[[list[int]], float]] = {
            "shardline": lambda prompt: own_generate(own[0], prompt),
            "llama.cpp": lambda prompt: llama_generate(urls[0], prompt)[0],
            "shardline with drafts": lambda prompt: own_generate(own[1], prompt),
            "llama.cpp with drafts": drafting_llama,
        }
        seconds: dict[str, list[float]] = {how: [] for how in engines}
        for turn in range(1 + asked.rounds):
            prompts = [[dice.randrange(VOCAB_SIZE) for _ in range(PROMPT_LEN)] for _ in range(4)]
            for how, generate in engines.items():
                taken = sum(map(generate, prompts))
                if turn:  # the first one is slow: steps are recorded
                    seconds[how].append(taken)
        for how, found in seconds.items():
            print(f"{how}: {4 * OUTPUT_LEN / statistics.median(found):.1f} tok/s")
        for drafts in ("", " with drafts"):
            pairs = zip(seconds[f"llama.cpp{drafts}"], seconds[f"shardline{drafts}"], strict=True)
            ratios = sorted(theirs / ours for theirs, ours in pairs)
            middle = statistics.median(ratios)
            print(f"shardline / llama.cpp{drafts}: {middle:.2f} x [{ratios[0]:.2f}-{ratios[-1]:.2f}]")
        print(
            f"right guesses: {acceptance(own[1])}; llama.cpp {accepted[0] / max(1, accepted[1]):.0%} of {accepted[1]}"
        )


if __name__ == "__main__":
    main()
