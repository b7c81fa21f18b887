"""Fields that requests may have, and that have no effect here."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from shardline.server.json_body import RequestModel
from shardline.server.middleware import IGNORED_HEADER

MAX_METADATA = 16
"""The most entries of `metadata`, as at OpenAI."""


def check_metadata(value: Any) -> Any:
    """Refuse large metadata before its entries are looked at."""
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"it has {len(value)} entries; at most {MAX_METADATA} are taken")
    return value


MAX_ID_CHARS = 256


class IgnoredFields(RequestModel):
    """Taken with any value. `null` counts as not sent."""

    taken_here: ClassVar[frozenset[str]] = frozenset()
    """Those of these fields that have an effect at one endpoint."""

    # OpenAI
    store: Any = None
    metadata: Annotated[Any, BeforeValidator(check_metadata)] = None
    service_tier: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    prediction: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    # vLLM
    early_stopping: Any = None
    spaces_between_special_tokens: Any = None
    detokenize: Any = None
    request_id: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    session_id: Any = None
    stream_interval: Any = None
    mm_payload: Any = None
    return_mm_kwargs: Any = None
    routed_experts_prompt_start: Any = None
    guided_decoding_backend: Any = None
    vllm_xargs: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    # SGLang and the routers
    no_stop_trim: Any = None
    stream_reasoning: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    return_cached_tokens_details: Any = None
    return_meta_info: Any = None
    rid: Any = None
    extra_key: Any = None
    session_params: Any = None
    custom_params: Any = None
    data_parallel_rank: Any = None
    routed_dp_rank: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None

    @property
    def ignored_headers(self) -> dict[str, str]:
        """The header that names the ignored fields of this request; empty: it has none."""
        sent = self.model_fields_set - self.taken_here
        names = [name for name in IgnoredFields.model_fields if name in sent and getattr(self, name) is not None]
        return {IGNORED_HEADER: ", ".join(names)} if names else {}


IGNORED_NAMES = frozenset(IgnoredFields.model_fields)
