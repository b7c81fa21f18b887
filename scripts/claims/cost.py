"""Claims about prices, and when an API is cheaper."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.claims.base import LLAMA_70B, Claim, against, cluster, decided, option, speed
from shardline.planner.cost import HOURS_PER_DAY, HOURS_PER_MONTH, ApiPrice, break_even_tokens
from shardline.planner.layout import Demand, Layout

TITLE = "Cost"
_API = ApiPrice(0.9, 0.9, 0.9)


def claims() -> Iterator[Claim]:
    """All of them."""
    yield against("10 M tokens a day are 116 tok/s sustained", 116, 116, 10e6 / 86400, "{} tok/s")
    for quote, gpus, dollars in (
        ("One A100: $2,400 a month", "1xA100-80GB", 2400),
        ("Four A100: $5,760 a month", "4xA100-80GB", 5760),
        ("Four A100: $7,200 a month", "4xA100-80GB", 7200),
        ("4 x H100: $15,840 a month", "4xH100", 15840),
        ("Eight H100: $23,000 a month", "8xH100", 23000),
    ):
        prices = cluster(gpus).price_per_hour
        assert prices is not None
        low, high = (price * HOURS_PER_MONTH for price in prices)
        yield decided(quote, low <= dollars <= high, f"${low:,.0f} (spot) to ${high:,.0f} (on demand) for 720 hours")
    demand = Demand(2048, 1024, 128)
    for gpus, layout in (("1xH100", Layout("vllm", weights="int4")), ("4xH100", Layout("vllm", 4))):
        prices = cluster(gpus).price_per_hour
        assert prices is not None
        spot, full = (break_even_tokens(HOURS_PER_DAY * price, _API, demand) / 1e6 for price in prices)
        found = speed(LLAMA_70B, gpus, layout, None).output_tok_s.p50
        most = found * (1 + 1024 / 128) * 86400 / 1e6
        yield decided(
            f"APIs win below 5 M tokens a day (70B on {gpus})",
            False,
            f"below {spot:,.0f} M (spot) to {full:,.0f} M (on demand) tokens a day, at $0.90 a million and GPUs paid "
            f"for every hour; the layout does {most:,.0f} M",
        )
    four_a100 = speed(LLAMA_70B, "4xA100-80GB", Layout("vllm", 4), None).output_tok_s.p50
    yield against(
        "70B on 4 x A100: 1,800 tok/s (in the table of costs)",
        1800,
        1800,
        four_a100,
        "{} tok/s with as many requests as fit (1,024 in, 128 out)",
    )
    four_h100 = speed(LLAMA_70B, "4xH100", Layout("vllm", 4), None).output_tok_s.p50
    yield against(
        "70B on 4 x H100: 4,200 tok/s (in the table of costs)",
        4200,
        4200,
        four_h100,
        "{} tok/s with as many requests as fit",
    )
    name = "neuralmagic/Meta-Llama-3.1-70B-Instruct-FP8"
    demand = Demand(8192, 1024, 128)
    two = option(name, "2xH100", Layout("vllm", 2, weights="fp8"), demand).speed
    assert two is not None
    total = two.output_tok_s.p50 * (1 + 1024 / 128)
    yield against("70B FP8 on 2 H100: 8,967 tok/s, all tokens", 8967, 8967, total, "{} tok/s")
    yield decided("... and 2,282 tok/s on one (3.9x)", False, "at utilization 0.9 one H100 has no room for a request")
