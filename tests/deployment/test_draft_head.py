"""Heads in a deployment: what they take, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from shardline.deployment.deployment import Deployment
from shardline.planner.catalog import find_model
from tests.deployment.machines import machine, resolve_on
from tests.models.checkpoints import make_checkpoint
from tests.models.heads import as_library, make_eagle, make_eagle3, make_predicting

_HIDDEN, _VOCAB = 64, 256


def resolved(model: Path, head: Path | None = None, **options: object) -> Deployment:
    asked: dict[str, object] = {"method": "mtp", "num_speculative_tokens": 3}
    if head is not None:
        asked |= {"method": "eagle", "model": str(head)}
    asked |= options.pop("draft", {})  # type: ignore[call-overload]
    return resolve_on(machine(), model=str(model), speculative_config=asked, **options)


def test_it_has_the_embedding_and_the_lm_head_of_the_model(tmp_path: Path) -> None:
    model, head = make_checkpoint("llama", tmp_path / "model"), make_eagle(tmp_path / "head")
    draft = resolved(model, head, dtype="float32").draft
    assert draft is not None
    own = sum(tensor.nbytes for key, tensor in load_file(head / "model.safetensors").items() if "embed" not in key)
    assert draft.weights[0].num_bytes == own
    assert draft.spec.max_position_embeddings == 256  # the model's
    # Hidden states lie beside the keys and values of its layer.
    alone = resolve_on(machine(), model=str(model), dtype="float32")
    block_size = alone.cache.block_size
    assert draft.block_bytes[0] == alone.cache.block_bytes[0] // 4 + block_size * _HIDDEN * 4
    # A later stage has no embedding, so it is read there, too.
    split = resolved(model, head, dtype="float32", tensor_parallel_size=2, pipeline_parallel_size=2).draft
    assert split is not None
    assert [rank.num_bytes for rank in split.weights[:2]] == [0, 0]
    replicated, embedding = _HIDDEN * 4, _VOCAB * _HIDDEN * 4  # one norm
    assert sum(rank.num_bytes for rank in split.weights[2:]) == own + replicated + embedding
    # Each rank may have its layers whole, and shares the model's embedding.
    size = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "draft": {"draft_tensor_parallel_size": 1}}
    whole = resolved(model, head, dtype="float32", **size).draft
    assert whole is not None
    assert sum(rank.num_bytes for rank in whole.weights[2:]) == 2 * own + embedding
    assert whole.block_bytes == (0, 0, draft.block_bytes[0], draft.block_bytes[0])


def test_layers_for_multi_token_prediction_have_the_format_of_the_model(tmp_path: Path) -> None:
    both = resolved(make_predicting("mimo", tmp_path), quantization="int8")
    assert both.draft is not None
    assert both.draft.weight_format == both.weight_format
    assert both.draft.model.folder == both.model.folder


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": 32}, "reads hidden states of 32 elements, and those of the model have 64"),
        ({"vocab_size": 512}, "its vocabulary has 512 tokens, and that of the model 256"),
    ],
)
def test_heads_of_other_models_are_refused(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    model, head = make_checkpoint("llama", tmp_path / "model"), make_eagle(tmp_path / "head", **overrides)
    with pytest.raises(ValueError, match=message) as error:
        resolved(model, head)
    assert "\n" not in str(error.value)


def test_ranks_that_share_keys_divide_a_head_like_others(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path / "model", max_position_embeddings=1024)
    head = make_eagle(tmp_path / "head", max_position_embeddings=1024)
    shared, other = (
        resolved(model, head, device="cpu", **{name: 2}).draft
        for name in ("context_parallel_size", "tensor_parallel_size")
    )
    assert shared is not None
    assert other is not None
    assert shared.block_bytes == other.block_bytes
    assert shared.weights == other.weights


def test_what_is_no_head_is_refused(tmp_path: Path) -> None:
    model, head = make_checkpoint("llama", tmp_path / "model"), make_eagle(tmp_path / "head")
    with pytest.raises(ValueError, match=r"it is no EAGLE head \(fc.weight is missing\)"):
        resolved(model, model)
    with pytest.raises(ValueError, match=r"whose checkpoint has layers for it .*deepseek_v3.* and this is llama"):
        resolved(model)
    file = head / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "fc.weight": tensors["fc.weight"][:, :9].contiguous()}, file)
    with pytest.raises(ValueError, match=r"fc\.weight"):
        resolved(model, head)


def test_a_head_of_eagle_3_has_an_lm_head(tmp_path: Path) -> None:
    model, method = make_checkpoint("llama", tmp_path / "model"), {"draft": {"method": "eagle3"}}
    head = make_eagle3(tmp_path / "head", tokens=range(0, 256, 4))
    draft = resolved(model, head, dtype="float32", **method).draft
    assert draft is not None
    tensors = load_file(head / "model.safetensors")
    offsets = tensors.pop("d2t")
    tensors.pop("t2d")
    assert draft.weights[0].num_bytes == sum(tensor.nbytes for tensor in tensors.values()) + 4 * len(offsets)
    random = resolved(model, head, load_format="dummy", **method).draft
    assert random is not None
    assert random.spec.vocab_size == len(offsets)


@pytest.mark.parametrize(
    ("method", "made", "options", "message"),
    [
        ("eagle", {}, {}, 'it is an EAGLE 3 head; use the method "eagle3"'),
        ("eagle3", {"vocab_size": 512}, {}, "its vocabulary has 512 tokens, and that of the model 256"),
        (
            "eagle3",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 2]}},
            {},
            r"inputs of the layers \[1, 4, 2\], and the model has 4 layers",
        ),
    ],
)
def test_heads_of_eagle_3_that_do_not_fit_are_refused(
    method: str, made: dict[str, Any], options: dict[str, object], message: str, tmp_path: Path
) -> None:
    model, head = make_checkpoint("llama", tmp_path / "model"), make_eagle3(tmp_path / "head", **made)
    with pytest.raises(ValueError, match=message) as error:
        resolved(model, head, draft={"method": method}, **options)
    assert "\n" not in str(error.value)


def test_heads_of_the_library_speculators_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model, plain = make_checkpoint("llama", tmp_path / "model"), make_eagle3(tmp_path / "plain")
    head = as_library(plain, tmp_path / "head", "eagle3")
    older = as_library(make_eagle(tmp_path / "eagle"), tmp_path / "older", "eagle")
    for found, method, message in (
        (head, "eagle", 'it is an EAGLE 3 head; use the method "eagle3"'),
        (older, "eagle3", 'an older head needs the method "eagle"'),
        (head, "draft_model", r'it is a head \(speculators_model_type .* beside .*"method": "eagle3"'),
    ):
        for options in ({}, {"load_format": "dummy"}):
            with pytest.raises(ValueError, match=message):
                resolved(model, found, draft={"method": method}, **options)


@pytest.mark.parametrize(
    ("kind", "sign"),
    [
        ("eagle", "fc.weight of its checkpoint"),
        ("eagle3", "architectures LlamaForCausalLMEagle3 of its config.json"),
        ("library", "speculators_model_type of its config.json"),
        ("unnamed", "fc.weight of its checkpoint"),
    ],
)
def test_a_head_alone_is_refused_with_what_to_do(kind: str, sign: str, tmp_path: Path) -> None:
    head = make_eagle(tmp_path / "head") if kind == "eagle" else make_eagle3(tmp_path / "head")
    if kind == "library":
        head = as_library(head, tmp_path / "library", "eagle3")
    elif kind == "unnamed":
        config = json.loads((head / "config.json").read_text())
        (head / "config.json").write_text(json.dumps({**config, "architectures": None}))
    method = "eagle" if kind == "eagle" else "eagle3"
    message = rf"it is a head \({sign}\) .*: MODEL --speculative-config '\{{\"method\": \"{method}\", "
    for read in (lambda: resolve_on(machine(), model=str(head)), lambda: find_model(str(head))):
        with pytest.raises(ValueError, match=message) as error:
            read()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"speculators_model_type": "dflash"}, "speculators_model_type 'dflash' is a head that is not supported; supp"),
        ({"speculators_model_type": 3}, "speculators_model_type must be a string, got 3"),
        ({"transformer_layer_config": None}, "transformer_layer_config.model_type is missing"),
        ({"transformer_layer_config": "llama"}, "transformer_layer_config must be an object, got 'llama'"),
        ({"draft_vocab_size": None}, "draft_vocab_size is missing"),
        ({"target_hidden_size": 128}, "target_hidden_size must be the hidden_size 64 of the head"),
        ({"layernorms": True}, "layernorms is true, and an EAGLE head with norms around its layer"),
        ({"embed_requires_grad": True}, "embed_requires_grad is true, and an embedding of its own is not supported"),
        ({"norm_before_residual": "no"}, "norm_before_residual must be true or false, got 'no'"),
        ({"eagle_aux_hidden_state_layer_ids": [4]}, r"inputs of the layers \[4\], and the model has 4 layers"),
    ],
)
def test_broken_heads_of_the_library_speculators_are_refused(
    made: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model, plain = make_checkpoint("llama", tmp_path / "model"), make_eagle3(tmp_path / "plain")
    head = as_library(plain, tmp_path / "head", "eagle3", **made)
    with pytest.raises(ValueError, match=message) as error:
        resolved(model, head, draft={"method": "eagle3"})
    assert "\n" not in str(error.value)


def test_an_older_head_is_no_eagle_3_head(tmp_path: Path) -> None:
    model, head = make_checkpoint("llama", tmp_path / "model"), make_eagle(tmp_path / "head")
    with pytest.raises(ValueError, match=r'it is no EAGLE 3 head .* an older head needs the method "eagle"'):
        resolved(model, head, draft={"method": "eagle3"})


def test_a_checkpoint_without_these_weights_is_refused(tmp_path: Path) -> None:
    model = make_checkpoint("deepseek_v3", tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match="the model has no layers for it"):
        resolved(model)
    file.write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    with pytest.raises(ValueError, match=r'the method "mtp" .* no weights for it \(model.layers.4.eh_proj.weight is'):
        resolved(model)
    assert resolved(model, load_format="dummy").draft is not None
