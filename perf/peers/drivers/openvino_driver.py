"""OpenVINO GenAI's continuous batching pipeline with token ids in and out. It loads what openvino_convert.py wrote."""

from __future__ import annotations

from openvino_convert import ir_folder
from protocol import Generate, refuse_other_than, serve

_KV_GIB = 2


def load(folder: str, precision: str) -> Generate:
    """Load bf16 or int8 weights, with prefix caching. The CPU plugin chooses the types of activations and KV cache."""
    refuse_other_than(precision, ["bf16", "int8"])
    path = ir_folder(folder, precision)
    if not path.exists():
        raise SystemExit(f"no {path}; write it with drivers/openvino_convert.py {folder} {precision}")
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = 2048
    scheduler.cache_size = _KV_GIB
    scheduler.enable_prefix_caching = True
    pipeline = genai.ContinuousBatchingPipeline(path, scheduler, "CPU")

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        config = genai.GenerationConfig(max_new_tokens=output_len, ignore_eos=True, do_sample=False)
        inputs = [ov.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results = pipeline.generate(inputs, [config] * len(inputs))
        return [list(result.m_generation_ids[0]) for result in results]

    return generate


if __name__ == "__main__":
    serve(load, "openvino-genai")
