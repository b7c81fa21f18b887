"""Shardline, offline."""

from __future__ import annotations

import sys

from protocol import Generate, serve


def load(folder: str) -> Generate:
    """`--option value` pairs after the folder are LLM(...) options."""
    from shardline import LLM, SamplingParams

    words = sys.argv[2:]
    options = {
        name.lstrip("-").replace("-", "_"): int(value) if value.isdecimal() else value
        for name, value in zip(words[::2], words[1::2], strict=True)
    }
    llm = LLM(folder, max_model_len=4096, **options)

    def generate(prompts: list[list[int]], output_len: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == output_len for output in outputs)

    return generate


if __name__ == "__main__":
    serve(load)
