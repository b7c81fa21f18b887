"""A draft model in a deployment: where it runs, what it takes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from shardline.checkpoints.vocabulary import check_same_vocabulary
from shardline.deployment.deployment import Deployment
from shardline.deployment.fingerprint import numeric_contract
from tests.deployment.machines import GIB, machine, resolve_on
from tests.models.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a smaller one."""
    folder = tmp_path_factory.mktemp("models")
    draft = make_checkpoint("qwen3", folder / "draft", num_hidden_layers=2)
    return make_checkpoint("llama", folder / "model", num_hidden_layers=6), draft


def resolved(models: tuple[Path, Path], *, most: int = 3, free: int = 64 * GIB, **options: Any) -> Deployment:
    model, draft = models
    asked = {"model": str(draft), "num_speculative_tokens": most, **options.pop("draft", {})}
    return resolve_on(machine(free_memory=free), model=str(model), speculative_config=asked, **options)


def test_it_is_whole_on_the_ranks_of_the_last_stage(models: tuple[Path, Path]) -> None:
    layout: dict[str, Any] = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "dtype": "float32"}
    plain, both = resolve_on(machine(), model=str(models[0]), **layout), resolved(models, **layout)
    assert plain.draft is None
    assert plain.of_draft is None
    draft, own = both.draft, both.of_draft
    assert draft is not None
    assert own is not None
    assert [weights.num_bytes for weights in draft.weights[:2]] == [0, 0] == list(draft.block_bytes[:2])
    alone = resolve_on(machine(), model=str(models[1]), tensor_parallel_size=2, dtype="float32")
    assert draft.weights[2:] == alone.weights
    assert draft.block_bytes[2:] == alone.cache.block_bytes
    assert (own.model, own.spec, own.weights) == (draft.model, alone.spec, draft.weights)
    assert own.stages[-1].size == 2
    # The last stage has fewer layers of the model in return.
    assert [stage.size for stage in plain.stages] == [3, 3]
    assert both.stages[0].size > both.stages[1].size
    of_model = resolve_on(
        machine(), model=str(models[0]), pipeline_stages=",".join(str(stage.size) for stage in both.stages), **layout
    )
    assert [whole.num_bytes - own.num_bytes for whole, own in zip(both.weights, of_model.weights, strict=True)] == [
        weights.num_bytes for weights in draft.weights
    ]
    assert both.cache.block_bytes == of_model.cache.block_bytes


def test_it_may_be_whole_on_the_rank_that_reports_tokens(models: tuple[Path, Path]) -> None:
    alone = resolve_on(machine(), model=str(models[1]), dtype="float32")
    layouts: list[dict[str, Any]] = [
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        {"tensor_parallel_size": 4},
    ]
    for layout in layouts:
        split = resolved(models, dtype="float32", **layout)
        both = resolved(models, draft={"draft_tensor_parallel_size": 1}, dtype="float32", **layout)
        draft, driver = both.draft, both.grid.drivers[0]
        assert draft is not None
        for rank in range(4):
            has_it = rank == driver
            assert draft.weights[rank].num_bytes == has_it * alone.weights[0].num_bytes
            assert draft.block_bytes[rank] == has_it * alone.cache.block_bytes[0]
        # A pass over all of it takes longer than over a part, for which the last stage has fewer layers.
        assert both.stages[-1].size <= split.stages[-1].size


def test_memory_counts_its_weights_and_keys(models: tuple[Path, Path]) -> None:
    room: dict[str, Any] = {"kv_cache_memory": "1MiB", "max_model_len": 64, "max_num_seqs": 16}
    plain, both = resolve_on(machine(), model=str(models[0]), **room), resolved(models, **room)
    assert both.draft is not None
    own, more = both.cache.block_bytes[0], both.draft.block_bytes[0]
    assert both.cache.pool.num_blocks == (1 << 20) // (own + more) < plain.cache.pool.num_blocks  # type: ignore[union-attr]
    spare = both.draft.spare_bytes[0]
    assert spare == 16 * more  # a block for each sequence
    needed = plain.weights[0].num_bytes + both.draft.weights[0].num_bytes
    with pytest.raises(ValueError, match="the weights need"):
        resolved(models, free=needed)


def test_it_has_a_weight_format_of_its_own(models: tuple[Path, Path]) -> None:
    both = resolved(models, draft={"quantization": "int8"}, quantization="fp8")
    assert both.draft is not None
    assert (both.weight_format.name, both.draft.weight_format.name) == ("fp8", "int8")


def test_it_does_not_change_the_fingerprint(models: tuple[Path, Path]) -> None:
    kernels = "test"
    plain = numeric_contract(resolve_on(machine(), model=str(models[0])), kernels)
    assert numeric_contract(resolved(models), kernels) == plain


@pytest.mark.parametrize(
    ("family", "overrides", "options", "message"),
    [
        (
            "qwen3",
            {},
            {"draft": {"draft_tensor_parallel_size": 2}, "tensor_parallel_size": 4},
            "draft_tensor_parallel_size 2 of .*: 1 or the tensor_parallel_size 4 of the model works",
        ),
        ("qwen3", {"max_position_embeddings": 128}, {}, "has 128 positions; use --max-model-len 128"),
        ("qwen3", {"vocab_size": 512}, {}, "has 512 tokens, and that of the model 256"),
        ("qwen3", {}, {"tensor_parallel_size": 64}, "tensor_parallel_size 64"),
        (
            "llama",
            {"num_attention_heads": 2, "num_key_value_heads": 1},
            {"tensor_parallel_size": 4},
            "use 2; or draft_tensor_parallel_size 1 in speculative_config",
        ),
        ("qwen3_moe", {}, {"enable_expert_parallel": True}, "use a dense draft model"),
    ],
)
def test_refusals(
    models: tuple[Path, Path],
    family: str,
    overrides: dict[str, Any],
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
) -> None:
    draft = make_checkpoint(family, tmp_path, **overrides)
    model = make_checkpoint("qwen3_moe", tmp_path / "moe") if "enable_expert_parallel" in options else models[0]
    with pytest.raises(ValueError, match=message) as error:
        resolved((model, draft), **options)
    assert "\n" not in str(error.value)


def test_what_is_no_model_is_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the draft model '.*nowhere' of speculative_config"):
        resolved((models[0], tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"the draft model '.*' of speculative_config.*config.json"):
        resolved((models[0], tmp_path))
    windowed = make_checkpoint("mistral", tmp_path / "windowed", sliding_window=64)
    with pytest.raises(ValueError, match="block table of layers without a window, and the model has none"):
        resolved((windowed, models[1]))


def write_tokenizer(folder: Path, words: list[str]) -> str:
    folder.mkdir()
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def test_vocabularies_are_compared_by_their_contents(tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(100)]
    same, other, short = (
        write_tokenizer(tmp_path / name, own)
        for name, own in (("same", words), ("other", [*words[:7], "another", *words[8:]]), ("short", words[:40]))
    )
    check_same_vocabulary((same, 100), (same, 100))
    check_same_vocabulary((same, 100), (same, 104))  # padding
    check_same_vocabulary(("", 100), ("", 100))
    with pytest.raises(ValueError, match="token 7 is 'another', and 'word7' in that of the model"):
        check_same_vocabulary((same, 100), (other, 100))
    with pytest.raises(ValueError, match="token 40 is missing, and 'word40'"):
        check_same_vocabulary((same, 100), (short, 100))
    with pytest.raises(ValueError, match="has 120 tokens, and that of the model 100; only padding may differ"):
        check_same_vocabulary((same, 100), (same, 120))
    with pytest.raises(ValueError, match="must be equal"):
        check_same_vocabulary(("", 100), (same, 101))
    # An added token stands above the model's own, and a list has scores.
    content = json.loads(Path(same).read_text())
    content["model"]["vocab"] = [[word, 0.0] for word in [*words[:7], "another", *words[8:]]]
    content["added_tokens"] = [{"id": 7, "content": "word7"}]
    added = tmp_path / "added.json"
    added.write_text(json.dumps(content))
    check_same_vocabulary((same, 100), (str(added), 100))
    added.write_text('{"model": {}}')
    with pytest.raises(ValueError, match="has no vocabulary"):
        check_same_vocabulary((same, 100), (str(added), 100))
