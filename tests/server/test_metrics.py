from __future__ import annotations

import httpx
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from shardline.config.server import ServerConfig
from shardline.deployment.deployment import KernelFallback
from shardline.messages.copies import CopyCounts
from shardline.messages.stats import DraftStats, EngineStats, ExpertLoad, TierStats, merge_stats
from shardline.metrics.histogram import FastHistogram
from shardline.metrics.server import ServerMetrics
from tests.server.conftest import serve
from tests.server.fake_engine import MAX_MODEL_LEN, REPLY
from tests.text.builders import byte_level_json, tokenizer

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(http: httpx.Client) -> Samples:
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return parse(answer.text)


def parse(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_request_may_ask_for_any_number_of_tokens() -> None:
    with serve() as running, running.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 10**400})
        assert answer.status_code == 200, answer.text
        asked = scrape(http)["shardline:request_params_max_tokens_sum", frozenset([("model_name", "demo")])]
        assert asked == MAX_MODEL_LEN


def test_requests_are_measured() -> None:
    with serve() as running, running.http() as http:
        running.engine.cached_tokens = 1
        running.engine.seconds_per_token = 0.005
        model = ("model_name", "demo")
        answer = http.post("/v1/completions", json={"prompt": "Hi there", "n": 2, "max_tokens": 99}).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
        http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 3})
        http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": -1})
        found = scrape(http)
        assert found["shardline:request_success_total", frozenset([model, ("finished_reason", "stop")])] == 2
        assert found["shardline:request_success_total", frozenset([model, ("finished_reason", "length")])] == 1
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens"):
            assert found[f"shardline:{name}_count", frozenset([model])] == 2
        tokens = len(tokenizer(byte_level_json()).encode_text(REPLY)) + 1
        assert found["shardline:request_generation_tokens_sum", frozenset([model])] >= 2 * tokens + 3
        assert found["shardline:inter_token_latency_seconds_count", frozenset([model])] > 0
        handled = frozenset([("handler", "/v1/completions"), ("method", "POST"), ("status", "200")])
        assert found["shardline:http_requests_total", handled] == 2
        engine = frozenset([model, ("engine", "0")])
        assert found["shardline:generation_tokens_total", engine] == 7
        assert found["shardline:num_requests_running", engine] == 0
        [cache] = [dict(labels) for name, labels in found if name == "shardline:cache_config_info"]
        assert cache["kv_cache_max_concurrency"] == "25.00"
        assert cache["kv_cache_size_tokens"] == str(25 * MAX_MODEL_LEN)


def test_engine_stats_are_labelled_by_replica() -> None:
    steps = [1, *[0] * 12, 2]
    stats = [
        EngineStats(
            kv_blocks_total=8,
            kv_blocks_used=2,
            num_preemptions=3,
            prompt_tokens=50_000,
            generation_tokens=1,
            step_tokens=steps,
        ),
        EngineStats(num_waiting=4),
    ]
    body, content_type = ServerMetrics("m", lambda: stats, read_refused=lambda: 5).expose("")
    found = parse(body.decode())
    first, second = (frozenset([("model_name", "m"), ("engine", str(index))]) for index in range(2))
    assert content_type.startswith("text/plain")
    assert found["shardline:kv_cache_usage_perc", first] == 0.25
    assert found["shardline:kv_cache_usage_perc", second] == 0
    assert found["shardline:num_preemptions_total", first] == 3
    assert found["shardline:num_requests_waiting", second] == 4
    assert found["shardline:num_requests_waiting_by_reason", second | {("reason", "capacity")}] == 4
    assert found["shardline:iteration_tokens_total_bucket", first | {("le", "1.0")}] == 1
    assert found["shardline:iteration_tokens_total_bucket", first | {("le", "+Inf")}] == 3
    assert found["shardline:iteration_tokens_total_sum", first] == 50_001
    assert found["shardline:iteration_tokens_total_count", second] == 0
    reason = frozenset([("model_name", "m"), ("reason", "max_num_queued_reqs")])
    assert found["shardline:admission_rejections_total", reason] == 5


def test_kernels_that_torch_stands_in_for_are_named() -> None:
    failed = [(), (KernelFallback("attention", "hangs"),)]
    body, _ = ServerMetrics("m", lambda: [EngineStats()] * 2, read_fallbacks=lambda: failed).expose("")
    found = {key: value for key, value in parse(body.decode()).items() if key[0] == "shardline:kernel_fallbacks"}
    labels = frozenset([("model_name", "m"), ("engine", "1"), ("kernel", "attention")])
    assert found == {("shardline:kernel_fallbacks", labels): 1}


def test_drafts_are_counted_where_there_are_any() -> None:
    drafts = DraftStats(num_drafts=4, num_tokens=8, accepted=[3, 1], row_seconds={4: 0.25, 1: 0.5})
    body, _ = ServerMetrics("m", lambda: [EngineStats(drafts=drafts)]).expose("")
    for line in (
        'shardline:spec_decode_num_drafts_total{engine="0",model_name="m"} 4.0',
        'shardline:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 8.0',
        'shardline:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 4.0',
        'shardline:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 1.0',
        'shardline:spec_decode_row_seconds{batch="1",engine="0",model_name="m"} 0.5',
        'shardline:spec_decode_row_seconds{batch="4-7",engine="0",model_name="m"} 0.25',
    ):
        assert line in body.decode()
    body, _ = ServerMetrics("m", lambda: [EngineStats()]).expose("")
    assert b"spec_decode" not in body


def test_drafts_have_the_names_of_vllm_where_these_are_wanted() -> None:
    drafts = DraftStats(num_drafts=4, num_tokens=8, accepted=[3, 1])
    body, _ = ServerMetrics("m", lambda: [EngineStats(drafts=drafts)], "vllm").expose("")
    names = {line.split("{")[0] for line in body.decode().splitlines() if "spec_decode" in line and line[0] != "#"}
    counted = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    assert names == {f"vllm:spec_decode_{name}_total" for name in counted}


def test_the_second_tier_is_counted_where_there_is_one() -> None:
    tier = TierStats(8, 3, 640, 320, 2, CopyCounts(stored_bytes=4000, fetched_seconds=0.5, corrupt_blocks=1))
    stats = merge_stats([EngineStats(tier=tier), EngineStats(tier=tier), EngineStats()])
    assert stats.tier is not None
    assert (stats.tier.hits, stats.tier.copies.stored_bytes, stats.tier.copies.fetched_seconds) == (640, 8000, 1.0)
    body, _ = ServerMetrics("m", lambda: [EngineStats(tier=tier)], "vllm").expose("")
    labels = '{engine="0",model_name="m"'
    for line in (
        f"vllm:external_prefix_cache_queries_total{labels}}} 640.0",
        f"vllm:external_prefix_cache_hits_total{labels}}} 320.0",
        f'vllm:kv_offload_total_bytes_total{labels},transfer_type="GPU_to_CPU"}} 4000.0',
        f'vllm:kv_offload_total_time_total{labels},transfer_type="CPU_to_GPU"}} 0.5',
        f"shardline:kv_offload_blocks{labels}}} 8.0",
        f"shardline:kv_offload_corrupt_blocks_total{labels}}} 1.0",
        f"shardline:kv_offload_lost_blocks_total{labels}}} 2.0",
    ):
        assert line in body.decode()
    body, _ = ServerMetrics("m", lambda: [EngineStats()]).expose("")
    assert b"kv_offload" not in body


def test_load_of_experts_is_shown_where_there_are_any() -> None:
    load = ExpertLoad([5, 0, 7], [5, 7], 1.75, 1.1)
    body, _ = ServerMetrics("m", lambda: [EngineStats(experts=load)]).expose("")
    found = parse(body.decode())
    labels = [("model_name", "m"), ("engine", "0")]
    assert found["shardline:expert_tokens_total", frozenset([*labels, ("expert", "2")])] == 7
    assert found["shardline:expert_rank_tokens_total", frozenset([*labels, ("rank", "0")])] == 5
    assert found["shardline:expert_imbalance", frozenset(labels)] == 1.75
    assert found["shardline:expert_rank_imbalance", frozenset(labels)] == 1.1
    body, _ = ServerMetrics("m", lambda: [EngineStats()]).expose("")
    assert b"expert" not in body


def test_openmetrics_where_asked_for(http: httpx.Client) -> None:
    answer = http.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_metrics_can_be_turned_off() -> None:
    with serve(ServerConfig(enable_metrics=False)) as running, running.http() as http:
        assert http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2}).status_code == 200
        assert http.get("/metrics").status_code == 404


def test_the_cheap_histogram_is_exposed_like_prometheus_own() -> None:
    texts = []
    for cheap in (True, False):
        registry = CollectorRegistry()
        histogram: FastHistogram | Histogram
        if cheap:
            histogram = FastHistogram("a:b_seconds", "Help.", ("model_name", "m"), (0.001, 0.5, 80.0))
            registry.register(histogram)
            observed: FastHistogram | Histogram = histogram
        else:
            histogram = Histogram("a:b_seconds", "Help.", ["model_name"], buckets=(0.001, 0.5, 80.0), registry=registry)
            observed = histogram.labels("m")
        for value in (0.0005, 0.001, 0.0011, 0.7, 100.0):
            observed.observe(value)
        texts.append([line for line in generate_latest(registry).decode().splitlines() if "_created" not in line])
    assert texts[0] == texts[1]
