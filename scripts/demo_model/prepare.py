"""Write all files of the demo model except its trained weights: tokenizer, chat template, configurations.

A folder without weights gets the random weights with which `train.py` starts, so it can be loaded at once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from dialogue import load_items, load_small_talk, texts
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

MODEL_DIR = Path(__file__).parents[2] / "src" / "shardline" / "demo_model"
SEED = 20240229

SPECIAL_TOKENS = ("<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>")
PAD, BEGIN, END, USER, ASSISTANT = range(len(SPECIAL_TOKENS))
VOCAB_SIZE = 2048
MAX_POSITIONS = 2048

# System messages are left out on purpose: the model is too small to follow them, they would only disturb it. It was not
# trained to call tools either, but it calls them if the answer is constrained.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- if tools -%}
    {{- '<|user|>You may call these functions:\\n<tools>' -}}
    {%- for tool in tools -%}
        {{- '\\n' + tool | tojson -}}
    {%- endfor -%}
    {{- '\\n</tools>\\nTo call one, write:\\n' -}}
    {{- '<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>' + eos_token -}}
{%- endif -%}
{%- for message in messages if message['role'] in ('user', 'assistant', 'tool') -%}
    {%- set content = message['content'] or '' -%}
    {%- if content is not string -%}
        {%- set content = content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join -%}
    {%- endif -%}
    {%- if message['role'] == 'tool' -%}
        {{- '<|user|><tool_response>\\n' + content + '\\n</tool_response>' + eos_token -}}
    {%- else -%}
        {{- '<|' + message['role'] + '|>' + content | trim -}}
        {%- for call in message['tool_calls'] or () -%}
            {{- '\\n' if content or not loop.first -}}
            {{- '<tool_call>\\n{"name": ' + call['function']['name'] | tojson + ', "arguments": ' -}}
            {{- call['function']['arguments'] | tojson + '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- eos_token -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": BEGIN,
    "eos_token_id": END,
    "pad_token_id": PAD,
    "dtype": "bfloat16",
    # Readers that do not know `dtype` use this key.
    "torch_dtype": "bfloat16",
}

DRAFT_CONFIG: dict[str, Any] = {
    **CONFIG,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
"""That of the draft model, which can be split over as many ranks."""

HEAD_CONFIG: dict[str, Any] = {**CONFIG, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 16}
"""That of the EAGLE head, likewise."""

GENERATION_CONFIG: dict[str, Any] = {
    "bos_token_id": BEGIN,
    "eos_token_id": END,
    "pad_token_id": PAD,
    "do_sample": False,
}

TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": SPECIAL_TOKENS[BEGIN],
    "eos_token": SPECIAL_TOKENS[END],
    "pad_token": SPECIAL_TOKENS[PAD],
    "model_max_length": MAX_POSITIONS,
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}


def train_tokenizer(lines: list[str]) -> Tokenizer:
    """A byte-level BPE of exactly VOCAB_SIZE tokens that puts the begin token before plain text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL_TOKENS[BEGIN]} $A", special_tokens=[(SPECIAL_TOKENS[BEGIN], BEGIN)]
    )
    return tokenizer


def new_model(config: dict[str, Any] = CONFIG) -> LlamaForCausalLM:
    """The model with its first, random weights in float32. They are the same at every call."""
    torch.manual_seed(SEED)
    return LlamaForCausalLM(LlamaConfig(**{**config, "dtype": "float32", "torch_dtype": "float32"}))


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_weights(model: LlamaForCausalLM, path: Path) -> None:
    """Write the weights rounded to bfloat16. Readers see the old file or the new file, never a part of it."""
    # A tied parameter is written once, under its first name.
    write_tensors({name: parameter.detach() for name, parameter in model.named_parameters()}, path)


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors as `write_weights` does."""
    unfinished = path.with_suffix(".part")
    rounded = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(rounded, unfinished, metadata={"format": "pt"})
    unfinished.chmod(0o644)
    unfinished.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo model's tokenizer and configurations.")
    parser.add_argument("--output", type=Path, default=MODEL_DIR)
    arguments = parser.parse_args()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    train_tokenizer(texts(load_items(), load_small_talk())).save(str(output / "tokenizer.json"))
    write_json(output / "tokenizer_config.json", TOKENIZER_CONFIG)
    write_json(output / "config.json", CONFIG)
    for name, config in (("draft", DRAFT_CONFIG), ("eagle", HEAD_CONFIG)):
        (output / name).mkdir(exist_ok=True)
        write_json(output / name / "config.json", config)
    write_json(output / "generation_config.json", GENERATION_CONFIG)
    if not (output / "model.safetensors").exists():
        write_weights(new_model(), output / "model.safetensors")
    print(f"{output}: {sum(file.stat().st_size for file in output.iterdir()) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
