"""Train an EAGLE head for the demo model, and write its weights and configuration.

The head is one layer (Li et al., 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty"). Each row
reads the model's last hidden state of a token and the embedding of the next token, and guesses the token after it with
the model's lm_head. It is trained on its own output, too, in place of hidden states that are not there yet (Li et al.,
2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test"). The right guess is
what the model answers. `train.py` has the texts, the schedule and the optimizer's figures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from dialogue import load_items, load_small_talk
from evaluate import load_model
from prepare import HEAD_CONFIG, MODEL_DIR, PAD, SEED, write_tensors
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from train import BETAS, IGNORED, WEIGHT_DECAY, Curriculum, Example, ExampleMaker, Mixture, Schedule
from transformers import LlamaForCausalLM

NUM_GUESSES = 4
"""Guesses that follow each token in training, each from those before it."""
KEPT_WEIGHT = 0.9
"""How much a guess counts beside the one before it."""
SIZE, HEADS, HEAD_DIM = (int(HEAD_CONFIG[key]) for key in ("hidden_size", "num_attention_heads", "head_dim"))
TOKEN_SCALE = 20.0
"""Embeddings are so much smaller than hidden states. Their part of the projection is trained as if they were not."""
_LAYER = {
    "norm": "post_attention_layernorm",
    **{f"{name}_proj": f"self_attn.{name}_proj" for name in "qkvo"},
    **{f"{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
PLACES = {"fc.weight": "fc.weight", **{f"{own}.weight": f"layers.0.{place}.weight" for own, place in _LAYER.items()}}
"""What a checkpoint calls each weight."""


class Head(nn.Module):
    """The head in float32."""

    def __init__(self) -> None:
        super().__init__()
        width, inner = HEADS * HEAD_DIM, int(HEAD_CONFIG["intermediate_size"])
        self.fc = nn.Linear(2 * SIZE, SIZE, bias=False)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(SIZE, width, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(width, SIZE, bias=False)
        self.norm = nn.RMSNorm(SIZE, eps=float(HEAD_CONFIG["rms_norm_eps"]))
        self.gate_proj, self.up_proj = (nn.Linear(SIZE, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, SIZE, bias=False)

    def guesses(self, embeddings: Tensor, hidden: Tensor) -> Iterator[Tensor]:
        """For each guess in turn, the outputs [B, T, SIZE] of rows, of which row p reads the token p + 1.

        `embeddings`: [B, T, SIZE] of the tokens that rows read; `hidden`: of the model, [B, T, SIZE]. In the outputs of
        guess n (from 0), row p has followed the model's hidden states up to row p - n; the first n rows mean nothing.
        """
        num_rows = hidden.shape[1]
        places = torch.arange(num_rows)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for number in range(NUM_GUESSES):
            x = self.fc(torch.cat([TOKEN_SCALE * embeddings, hidden], -1))
            q, k, v = (self._split(one(x)) for one in (self.q_proj, self.k_proj, self.v_proj))
            q, k = _rotated(q), _rotated(k)
            keys.append(k)
            values.append(v)
            # Those of the model's hidden states up to row p - number, and behind them a row of each guess before this.
            behind = places[:, None] - number < places
            scores = (q @ keys[0].transpose(-1, -2)).masked_fill(behind, -torch.inf)
            shifted = [(_shifted(keys[n], number - n), _shifted(values[n], number - n)) for n in range(1, number + 1)]
            own = [(q * key).sum(-1, keepdim=True) for key, _ in shifted]
            weights = (torch.cat([scores, *own], -1) / HEAD_DIM**0.5).softmax(-1)
            mixed = weights[..., :num_rows] @ values[0]
            for n, (_, value) in enumerate(shifted):
                mixed = mixed + weights[..., num_rows + n, None] * value
            x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
            normed = self.norm(x)
            x = x + self.down_proj(functional.silu(self.gate_proj(normed)) * self.up_proj(normed))
            yield x
            hidden = _shifted(x, 1)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)

    def tensors(self) -> dict[str, Tensor]:
        """Its weights by their names in a checkpoint."""
        tensors = {PLACES[name]: tensor.clone() for name, tensor in self.state_dict().items()}
        tensors["fc.weight"][:, :SIZE] *= TOKEN_SCALE
        return tensors


def _shifted(x: Tensor, by: int) -> Tensor:
    """Rows that are `by` places further along the last dimension but one."""
    return functional.pad(x, (0, 0, by, 0))[..., : x.shape[-2], :] if by else x


def _rotated(x: Tensor) -> Tensor:
    """With rotary positions: row p of [..., T, HEAD_DIM] has position p."""
    half = HEAD_DIM // 2
    rates = float(HEAD_CONFIG["rope_theta"]) ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[-2])[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def losses(head: Head, model: LlamaForCausalLM, batch: list[Example]) -> tuple[Tensor, list[float]]:
    """The loss of a batch, and for each guess the part of it that is right, those before it taken as given."""
    width = max(len(example.ids) for example in batch)
    ids = torch.tensor([example.ids + [PAD] * (width - len(example.ids)) for example in batch])
    answers = torch.tensor([example.targets + [IGNORED] * (width - len(example.ids)) for example in batch]) != IGNORED
    with torch.no_grad():
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state.float()
        matrix = model.lm_head.weight.float()
        # Row p guesses the token after p + 1.
        wanted = functional.linear(hidden, matrix).argmax(-1)[:, 1:]
    total, right = torch.zeros(()), []
    # The first rows that may guess are those of each prompt's last token.
    may_guess = answers[:, 1:] & answers[:, :-1]
    for number, output in enumerate(head.guesses(matrix[ids[:, 1:]], hidden[:, :-1])):
        if number:
            may_guess = may_guess & functional.pad(may_guess, (1, -1))
        logits, targets = functional.linear(output[may_guess], matrix), wanted[may_guess]
        if not len(targets):
            break
        total = total + KEPT_WEIGHT**number * functional.cross_entropy(logits, targets)
        right.append((logits.argmax(-1) == targets).float().mean().item())
    return total, right


def train(head: Head, model: LlamaForCausalLM, schedule: Schedule, check_every: int, output: Path) -> None:
    """Train the head in place, and write it at every check."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    curriculum = Curriculum(Mixture(0.08, 3), load_items(), load_small_talk(), ExampleMaker(tokenizer))
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=schedule.peak, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    average = [0.0] * NUM_GUESSES
    progress = tqdm(range(schedule.num_steps), unit="step", dynamic_ncols=True, mininterval=5)
    for step, batch in zip(progress, curriculum.batches(), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(step)
        loss, right = losses(head, model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average[: len(right)] = [0.98 * old + 0.02 * new for old, new in zip(average, right, strict=False)]
        if (step + 1) % check_every == 0:
            tqdm.write(f"step {step + 1}: right {' '.join(f'{share:.3f}' for share in average)}")
            write_tensors(head.tensors(), output)
    write_tensors(head.tensors(), output)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model's EAGLE head and write its weights.")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--peak-learning-rate", type=float, default=2e-3)
    parser.add_argument("--check-every", type=int, default=100)
    parser.add_argument("--output", type=Path, default=MODEL_DIR / "eagle" / "model.safetensors")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    model = load_model(MODEL_DIR / "model.safetensors").eval().to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    torch.manual_seed(SEED)
    head = Head()
    arguments.output.parent.mkdir(exist_ok=True)
    schedule = Schedule(arguments.steps, arguments.peak_learning_rate)
    train(head, model, schedule, arguments.check_every, arguments.output)
    print(f"trained in {(time.perf_counter() - start) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
