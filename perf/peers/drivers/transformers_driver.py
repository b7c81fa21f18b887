"""transformers: `generate` on one padded batch, as its users call it, without a prefix cache."""

from __future__ import annotations

from protocol import Generate, refuse_other_than, serve


def load(folder: str, precision: str) -> Generate:
    """Load the model in bfloat16, for all cores."""
    refuse_other_than(precision, ["bf16"])
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
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
        outputs: list[list[int]] = out[:, tokens.shape[1] :].tolist()
        return outputs

    return generate


if __name__ == "__main__":
    serve(load, "transformers")
