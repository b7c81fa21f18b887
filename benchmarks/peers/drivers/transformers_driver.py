"""transformers: `generate` on one padded batch, which is what its users call."""

from __future__ import annotations

from protocol import Generate, serve


def load(folder: str) -> Generate:
    """bfloat16, all cores."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def generate(prompts: list[list[int]], output_len: int) -> None:
        with torch.no_grad():
            tokens = torch.tensor(prompts)
            out = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                min_new_tokens=output_len,
                max_new_tokens=output_len,
                pad_token_id=0,
            )
        assert out.shape[1] == tokens.shape[1] + output_len

    return generate


if __name__ == "__main__":
    serve(load)
