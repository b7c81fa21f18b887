"""The names of metrics, and which of them are vLLM's too."""

from __future__ import annotations

OWN = "shardline:"
VLLM = "vllm:"

SHARED_NAMES = frozenset(
    {
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions", "prompt_tokens",
        "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens_cached", "cache_config_info",
        "request_success", "time_to_first_token_seconds", "inter_token_latency_seconds",
        "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
        "request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens", "request_params_n",
        "request_params_max_tokens", "request_num_preemptions", "request_prefill_kv_computed_tokens",
        "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos", "iteration_tokens_total", "num_requests_waiting_by_reason",
        "admission_rejections", "external_prefix_cache_queries", "external_prefix_cache_hits",
        "kv_offload_total_bytes", "kv_offload_total_time",
    }
)  # fmt: skip
"""Metrics that mean what vLLM's of the same name mean. All others keep their own prefix."""
