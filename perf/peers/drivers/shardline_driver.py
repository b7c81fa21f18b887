"""Shardline, offline."""

from __future__ import annotations

import sys

from protocol import Generate, refuse_other_than, serve


def load(folder: str, precision: str) -> Generate:
    """Load the model; with "file", as its files store it. Pairs `--option value` at the end are LLM(...) options."""
    refuse_other_than(precision, ["file", "bf16", "int8", "int4"])
    from shardline import LLM, SamplingParams

    words = sys.argv[3:]
    options = {
        name.lstrip("-").replace("-", "_"): int(value) if value.isdecimal() else value
        for name, value in zip(words[::2], words[1::2], strict=True)
    }
    if precision not in ("file", "bf16"):
        options["quantization"] = precision
    llm = LLM(folder, max_model_len=4096, **options)

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    serve(load, "shardline")
