"""LLM over fake engines: batches in order, chats, failures."""

from __future__ import annotations

import gc
import pickle
import threading
import time
from array import array
from typing import Any

import numpy as np
import pytest
from tqdm import tqdm

from shardline.api.adapters import LoRARequest
from shardline.api.batch import BatchRunner
from shardline.api.errors import EngineDead
from shardline.api.llm import LLM
from shardline.api.outputs import CompletionOutput, RequestOutput
from shardline.api.prompts import Prompt
from shardline.config.engine import EngineConfig
from shardline.metrics.reader import Counter, Gauge, Histogram
from shardline.sampling_params import SamplingParams, StructuredOutputsParams
from tests.api.fake_engine import MAX_MODEL_LEN, FakeCluster, load_text, next_token, scripted


def make(cluster: FakeCluster, **options: Any) -> LLM:
    return LLM.from_config(EngineConfig.from_options(**options), connect=cluster, load_text=load_text)


def test_outputs_come_in_the_order_of_the_prompts() -> None:
    cluster = FakeCluster()
    with make(cluster, data_parallel_size=2, max_num_seqs=4) as llm:
        prompts = [[5 + i, 6] for i in range(50)]
        params = [SamplingParams(max_tokens=1 + i % 9, n=1 + i % 2) for i in range(50)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        by_id = {request.request_id: request for client in cluster.clients for request in client.added}
        for i, output in enumerate(outputs):
            assert output.prompt_token_ids == prompts[i]
            for choice in output.outputs:
                request = by_id[f"{output.request_id}-{choice.index}"]
                assert choice.token_ids == [next_token(request, position) for position in range(1 + i % 9)]
        assert all(len(client.added) > 20 for client in cluster.clients)
    assert all(client.closed for client in cluster.clients)


def test_forms_of_prompts_and_params(capsys: pytest.CaptureFixture[str]) -> None:
    with make(FakeCluster()) as llm:
        assert [o.prompt for o in llm.generate("dog")] == ["dog"]
        assert [len(o.outputs[0].token_ids) for o in llm.generate([5, 6])] == [16]
        mixed: list[Prompt] = ["dog", {"prompt": "the"}, [5], {"prompt_token_ids": [6]}]
        assert [o.prompt for o in llm.generate(mixed)] == ["dog", "the", None, None]
        assert "tok/s" in capsys.readouterr().err
        assert llm.generate([]) == []
        with pytest.raises(ValueError, match="2 prompts but 1 sampling_params"):
            llm.generate(["a", "b"], [SamplingParams()])
        llm.generate("dog", use_tqdm=False)
        assert capsys.readouterr().err == ""


def test_priorities_are_one_for_all_or_one_for_each() -> None:
    cluster = FakeCluster()
    with make(cluster) as llm:
        llm.generate(["a", "b"], priority=[3, -1], use_tqdm=False)
        llm.generate("c", priority=2, use_tqdm=False)
        llm.chat([{"role": "user", "content": "a"}], priority=[5], use_tqdm=False)
        added = sorted((r for client in cluster.clients for r in client.added), key=lambda r: int(r.request_id[:-2]))
        assert [request.priority for request in added] == [3, -1, 2, 5]
        for wrong in ([0], []):
            with pytest.raises(ValueError, match=f"2 prompts but {len(wrong)} priorities"):
                llm.generate(["a", "b"], priority=wrong)


def test_the_tokenizer_writes_the_prompt_of_a_chat() -> None:
    with make(FakeCluster()) as llm:
        tokenizer, chat = llm.get_tokenizer(), [{"role": "user", "content": "hi"}]
        [output] = llm.chat(chat, use_tqdm=False)
        assert tokenizer.apply_chat_template(chat, add_generation_prompt=True).input_ids == output.prompt_token_ids
        assert tokenizer.model_max_length == MAX_MODEL_LEN


def test_a_progress_bar_of_ones_own() -> None:
    totals = []

    def make_bar(**options: Any) -> Any:
        totals.append(options["total"])
        return tqdm(disable=True)

    with make(FakeCluster()) as llm:
        llm.generate(["a", "b"], use_tqdm=make_bar)
    assert totals == [2]


@pytest.mark.parametrize("detokenize", [False, None])
def test_tokens_without_text(detokenize: Any) -> None:
    """vLLM takes None for no."""
    with make(FakeCluster()) as llm:
        [output] = llm.generate("dog", SamplingParams(detokenize=detokenize, logprobs=1), use_tqdm=False)
    [choice] = output.outputs
    assert (choice.text, len(choice.token_ids)) == ("", 16)
    assert choice.logprobs is not None
    assert {entry.decoded_token for entries in choice.logprobs for entry in entries.values()} == {None}


def test_prompts_are_cut_on_request() -> None:
    with make(FakeCluster()) as llm:
        params = [SamplingParams(truncate_prompt_tokens=2), SamplingParams(truncate_prompt_tokens=-1)]
        cut, fitted = llm.generate([[5, 6, 7], [5] * 100], params, use_tqdm=False)
    assert cut.prompt_token_ids == [6, 7]
    assert len(fitted.prompt_token_ids) == MAX_MODEL_LEN - 1


def test_a_chat_with_another_template_that_continues_a_message() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "dog"}]
    with make(FakeCluster()) as llm:
        template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
        [output] = llm.chat(
            chat, use_tqdm=False, chat_template=template, continue_final_message=True, add_generation_prompt=False
        )
        assert output.prompt == "[hi][dog"


def test_structured_outputs_config_decides_what_requests_leave_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM, "_start", lambda *_: None)
    asked: list[bool | None] = []

    class Grammars:
        def write_grammar_blocking(self, form: StructuredOutputsParams) -> str:
            asked.append(form.disable_any_whitespace)
            return "grammar"

    for config, form in (
        (None, StructuredOutputsParams(json_object=True)),
        ({"backend": "xgrammar", "disable_any_whitespace": True}, StructuredOutputsParams(json_object=True)),
        ('{"disable_any_whitespace": true}', StructuredOutputsParams(json_object=True, disable_any_whitespace=False)),
    ):
        llm = LLM(structured_outputs_config=config)
        llm._grammars = Grammars()  # type: ignore[assignment]
        llm._write_grammar(form)
    assert asked == [None, True, False]
    with pytest.raises(ValueError, match="unknown key 'whitespace'"):
        LLM(structured_outputs_config={"whitespace": True})


def test_parameters_may_be_changed_and_are_checked_later() -> None:
    with make(FakeCluster()) as llm:
        params = llm.get_default_sampling_params()
        params.max_tokens = 3
        [output] = llm.generate("dog", params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
        params.top_p = 7.0
        with pytest.raises(ValueError, match="top_p must be in"):
            llm.generate("dog", params, use_tqdm=False)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"max_tokens": "5"}, "max_tokens has a wrong type: Expected `int | null`, got `str`"),
        ({"temperature": None}, "temperature has a wrong type: Expected `float`"),
        ({"logit_bias": {5: "a"}}, "logit_bias has a wrong type"),
        ({"stop": [1]}, "stop has a wrong type"),
        ({"logit_bias": [1]}, "logit_bias has a wrong type"),
        ({"structured_outputs": 5}, "structured_outputs must be StructuredOutputsParams or a dict, got 5"),
        ({"output_kind": 7}, "output_kind must be a RequestOutputKind, got 7"),
        ({"detokenize": "x"}, "detokenize has a wrong type: Expected `bool`, got `str`"),
        ({"detokenize": None, "receipt": 1}, "receipt has a wrong type: Expected `bool`, got `int`"),
        ({"n": 1.5}, "n has a wrong type: Expected `int`, got `float`"),
        ({"logprob_token_ids": 3}, "logprob_token_ids has a wrong type"),
        ({"bad_words": "word"}, "bad_words must be a list of texts"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs has a wrong type: .*unknown field `jsn`"),
    ],
)
def test_parameters_of_a_wrong_type_are_named(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SamplingParams(**values)
    assert SamplingParams(structured_outputs={"regex": "a"}).structured_outputs == StructuredOutputsParams(regex="a")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompts", "keywords", "says"),
    [
        (None, {}, "a prompt is text, .* or a list of these; got NoneType"),
        (np.array([5]), {}, r"a list of these; got numpy.ndarray: give its .tolist\(\)"),
        ([np.array([5])], {}, r"a list of ids; got numpy.ndarray: give its .tolist\(\)"),
        ("a", {"sampling_params": {"max_tokens": 3}}, "sampling_params: give one SamplingParams for all prompts"),
        ("a", {"sampling_params": SamplingParams(allowed_token_ids=[1.5])}, "allowed_token_ids has token id 1.5"),  # type: ignore[list-item]
        ("a", {"priority": 1.5}, "priorities: give one int for all prompts"),
        (
            "a",
            {"lora_request": "sql"},
            "lora_requests: give one LoRARequest for all prompts",
        ),
    ],
)
def test_arguments_of_a_wrong_type_never_reach_an_engine(prompts: Any, keywords: dict[str, Any], says: str) -> None:
    cluster = FakeCluster()
    with make(cluster) as llm:
        with pytest.raises(ValueError, match=says):
            llm.generate(prompts, use_tqdm=False, **keywords)
        with pytest.raises(ValueError, match="beam_search takes BeamSearchParams"):
            llm.beam_search("a", SamplingParams())  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="an LLM cannot be pickled or copied"):
            pickle.dumps(llm)


def test_defaults_as_vllm_writes_them() -> None:
    params = SamplingParams.from_optional(
        top_p=None, stop=None, logit_bias=None, max_tokens=None, logprobs=True, seed=-1
    )
    assert params == SamplingParams(max_tokens=None, logprobs=1)
    other = params.clone()
    other.logit_bias[5] = 1.0
    assert params.logit_bias == {}
    with pytest.raises(ValueError, match="no code of users runs in the engine"):
        SamplingParams(logits_processors=[print])


def test_enqueued_prompts_run_together() -> None:
    with make(FakeCluster()) as llm:
        assert llm.enqueue("dog", SamplingParams(max_tokens=2)) == ["0"]
        with pytest.raises(ValueError, match="out of vocabulary"):
            llm.enqueue([[5], [999]])
        assert llm.llm_engine.get_num_unfinished_requests() == 1, "nothing of a refused batch is left"
        assert llm.enqueue([[5], [6]], priority=[1, 2]) == ["3", "4"]
        outputs = llm.wait_for_completion(use_tqdm=False)
        assert [output.request_id for output in outputs] == ["0", "3", "4"]
        assert llm.wait_for_completion() == []
        assert not llm.llm_engine.has_unfinished_requests()
        with pytest.raises(ValueError, match="LoRA is not enabled: start with --enable-lora"):
            llm.generate("dog", lora_request=LoRARequest("a", 1, "folder"))


def test_metrics_have_names_of_vllm() -> None:
    with make(FakeCluster(), data_parallel_size=2) as llm:
        llm.generate("dog", use_tqdm=False)
        metrics = llm.get_metrics()
    running = [metric for metric in metrics if metric.name == "vllm:num_requests_running"]
    assert [metric.labels["engine"] for metric in running] == ["0", "1"]
    assert all(isinstance(metric, Gauge) for metric in running)
    steps = [metric for metric in metrics if metric.name == "shardline:num_steps"]
    assert all(isinstance(metric, Counter) for metric in steps)
    tokens = [metric for metric in metrics if metric.name == "vllm:iteration_tokens_total"]
    assert all(isinstance(metric, Histogram) and metric.count == metric.buckets["+Inf"] for metric in tokens)
    assert len(tokens) == 2


def test_every_replica_forgets_its_prefixes() -> None:
    cluster = FakeCluster()
    with make(cluster, data_parallel_size=2) as llm:
        assert llm.reset_prefix_cache()
    assert [client.num_resets for client in cluster.clients] == [1, 1]


def test_nothing_runs_where_one_prompt_is_bad() -> None:
    cluster = FakeCluster()
    with make(cluster) as llm:
        with pytest.raises(ValueError, match="out of vocabulary"):
            llm.generate([[5], [999]])
        assert cluster.clients[0].added == []


def test_chat_renders_the_template() -> None:
    with make(FakeCluster()) as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer.bos_token_id is not None
        (output,) = llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
        assert output.prompt == "<|bos|><|user|>hi<|end|>\n<|assistant|>"
        assert output.prompt_token_ids.count(tokenizer.bos_token_id) == 1
        conversations = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
        assert len(llm.chat(conversations, use_tqdm=False)) == 2
        with pytest.raises(ValueError, match="must not be empty"):
            llm.chat([])
        with pytest.raises(ValueError, match=r"messages\[1\] has no content"):
            llm.chat([{"role": "assistant"}, {"role": "user"}])
        message = {"role": "user", "content": "hi"}
        for messages, keywords, says in (
            ([5], {}, "messages must be a list of objects; got int"),
            (message, {}, "messages must be a list of objects; got an object with 'role', 'content'"),
            ([message], {"tools": 5}, "tools must be a list of objects; got int"),
            ([message], {"chat_template_kwargs": 5}, "chat_template_kwargs must be an object; got int"),
        ):
            with pytest.raises(ValueError, match=says):
                llm.chat(messages, **keywords)  # type: ignore[arg-type]


def test_logprobs_have_the_shape_of_vllm() -> None:
    with make(FakeCluster()) as llm:
        [with_logprobs, without] = llm.generate(
            ["a", "b"], [SamplingParams(max_tokens=3, logprobs=2), SamplingParams(max_tokens=3)], use_tqdm=False
        )
    choice = with_logprobs.outputs[0]
    assert choice.finished()
    assert with_logprobs.finished
    assert choice.logprobs is not None
    assert len(choice.logprobs) == 3
    for entries, token_id in zip(choice.logprobs, choice.token_ids, strict=True):
        assert next(iter(entries)) == token_id, "the token itself comes first"
        entry = entries[token_id]
        assert (entry.logprob, entry.rank) == (-0.5, 1)
        assert isinstance(entry.decoded_token, str)
    assert choice.cumulative_logprob == -1.5
    assert without.outputs[0].logprobs is None
    assert without.outputs[0].cumulative_logprob is None


def test_what_the_runner_cannot_do_is_refused() -> None:
    with make(FakeCluster()) as llm, pytest.raises(ValueError, match="runner='pooling'"):
        llm.embed("a")
    with make(FakeCluster(), runner="pooling") as llm, pytest.raises(ValueError, match="use embed"):
        llm.generate("a")


def test_a_prompt_that_cannot_be_embedded_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = [
        CompletionOutput(index=0, finish_reason="stop", embedding=array("f", [1.0]).tobytes()),
        CompletionOutput(index=0, finish_reason="error", error="there are 3 blocks"),
    ]
    outputs = [
        RequestOutput(request_id=str(number), prompt=None, prompt_token_ids=[1], outputs=[choice])
        for number, choice in enumerate(choices)
    ]
    monkeypatch.setattr(BatchRunner, "run", lambda *_: (outputs, []))
    failure = pytest.raises(RuntimeError, match="prompt 1 could not be embedded: there are 3 blocks")
    with make(FakeCluster(), runner="pooling") as llm, failure:
        llm.embed(["a", "b"], use_tqdm=False)


def test_times_are_in_order() -> None:
    with make(FakeCluster()) as llm:
        _, times = llm.generate_timed(["a", "b"])
        assert all(t.submitted <= t.first_token <= t.finished for t in times)
        assert llm.stats()[0].num_steps > 0


def test_stop_strings() -> None:
    tokenizer = load_text(EngineConfig()).tokenizer
    assert tokenizer is not None
    with make(FakeCluster(next_token=scripted(tokenizer.encode_text("one two three")))) as llm:
        assert llm.generate("x", SamplingParams(stop=" t"))[0].outputs[0].text == "one"
        assert llm.generate("x", SamplingParams())[0].outputs[0].finish_reason == "stop"


def test_the_death_of_the_engine_is_an_error() -> None:
    cluster = FakeCluster()
    with make(cluster, on_failure="exit") as llm:
        cluster.clients[0].paused.set()
        threading.Timer(0.1, lambda: cluster.clients[0].die("rank 0 was killed")).start()
        with pytest.raises(EngineDead, match="rank 0 was killed"):
            llm.generate(["a", "b"], use_tqdm=False)
        with pytest.raises(EngineDead):
            llm.generate("a", use_tqdm=False)


def test_closing_ends_a_batch_that_runs_on_another_thread() -> None:
    cluster = FakeCluster()
    llm = make(cluster)
    cluster.clients[0].paused.set()
    threading.Timer(0.1, llm.close).start()
    with pytest.raises(EngineDead, match="was closed while it ran a batch"):
        llm.generate(["a", "b"], use_tqdm=False)
    with pytest.raises(EngineDead, match="make a new one"):
        llm.generate("a", use_tqdm=False)


def test_an_interrupt_aborts_and_leaves_the_engine_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster()
    with make(cluster) as llm:
        with monkeypatch.context() as patch:

            def interrupted(self: BatchRunner) -> Any:
                time.sleep(0.05)
                raise KeyboardInterrupt

            patch.setattr(BatchRunner, "_next_updates", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["a", "b"], SamplingParams(max_tokens=None), use_tqdm=False)
        assert len(cluster.clients[0].aborted) == 2
        assert llm.generate("c", use_tqdm=False)[0].outputs[0].finish_reason == "length"


def test_a_fork_neither_hangs_nor_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster()
    with make(cluster) as llm:
        with monkeypatch.context() as patch:
            patch.setattr("os.getpid", lambda: -1)
            with pytest.raises(EngineDead, match="make one in each process"):
                llm.generate("a", use_tqdm=False)
        assert llm.generate("c", use_tqdm=False)[0].outputs[0].finish_reason == "length"
        with monkeypatch.context() as patch:
            patch.setattr("os.getpid", lambda: -1)
            llm.close()
        assert not cluster.clients[0].closed
    assert cluster.clients[0].closed


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="unknown option 'tensor_parallel'; did you mean tensor_parallel_size"):
        LLM("demo", tensor_parallel=2)


def test_a_failed_start_closes_the_engines() -> None:
    cluster = FakeCluster(start_error=RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        make(cluster, data_parallel_size=2)
    assert all(client.closed for client in cluster.clients)


def test_dropping_the_last_reference_ends_the_engine() -> None:
    cluster = FakeCluster()
    llm = make(cluster)
    del llm
    gc.collect()
    assert all(client.closed for client in cluster.clients)


def test_a_closed_engine_says_so() -> None:
    llm = make(FakeCluster())
    llm.close()
    with pytest.raises(EngineDead, match="was closed"):
        llm.generate("Hi", use_tqdm=False)


def test_grammars_are_checked_in_a_process_of_their_own() -> None:
    cluster = FakeCluster()
    with make(cluster) as llm:
        form = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}})
        llm.generate(["dog", "cat"], SamplingParams(structured_outputs=form, max_tokens=2), use_tqdm=False)
        grammars = {request.constraints.grammar for request in cluster.clients[0].added if request.constraints}
        assert len(grammars) == 1
        assert '"a"' in grammars.pop()
        chain = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(2700)) + 'r2700: "x"\n'
        for grammar, reason in ((chain, "stack"), ("start: start", "no text matches")):
            params = SamplingParams(structured_outputs=StructuredOutputsParams(grammar=grammar))
            with pytest.raises(ValueError, match=reason):
                llm.generate("dog", params, use_tqdm=False)
