"""What a deployment costs, and when a managed API is cheaper. All prices are US dollars."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardline.planner.layout import Demand

HOURS_PER_DAY = 24
HOURS_PER_MONTH = 720
SECONDS_PER_HOUR = 3600
_MILLION = 1e6


@dataclass(frozen=True)
class ApiPrice:
    """Prices of a managed API for a million tokens."""

    input: float
    cached: float
    """Of input tokens whose prefix is cached."""
    output: float

    def per_token(self, demand: Demand) -> float:
        """Price of the mean token, input or output."""
        cached = min(demand.cached_len, demand.input_len)
        total = (demand.input_len - cached) * self.input + cached * self.cached + demand.output_len * self.output
        return total / (demand.input_len + demand.output_len) / _MILLION


@dataclass(frozen=True)
class OtherPrices:
    """What a deployment costs besides its GPUs."""

    traffic: float = 0.0
    """For 1e9 bytes between nodes."""
    operations: float = 0.0
    """A month: people, monitoring, storage."""

    def check(self) -> None:
        """See that no price is below zero.

        Raises:
            ValueError: one is.
        """
        for flag, price in (("--traffic-price", self.traffic), ("--operations-price", self.operations)):
            if not 0 <= price < math.inf:
                raise ValueError(f"{flag} {price:g} must be at least 0")


def parse_api_price(text: str) -> ApiPrice:
    """The prices in "IN,CACHED,OUT".

    Raises:
        ValueError: the text has another form.
    """
    try:
        prices = [float(part) for part in text.split(",")]
    except ValueError:
        prices = []
    if len(prices) != 3 or not all(0 <= price < math.inf for price in prices) or max(prices) == 0:
        raise ValueError(f"--api-price {text!r}: write dollars per million tokens as IN,CACHED,OUT, such as 3,0.3,15")
    return ApiPrice(*prices)


def per_million(price_per_hour: float, tokens_per_second: float) -> float:
    """Dollars for a million tokens."""
    return price_per_hour / (tokens_per_second * SECONDS_PER_HOUR) * _MILLION


def break_even_tokens(price_per_day: float, api: ApiPrice, demand: Demand, price_per_token: float = 0.0) -> float:
    """Tokens a day, input and output, from which reserved GPUs are cheaper than the API; inf: they never are.

    `price_per_day` is paid whether the GPUs are busy or not, and `price_per_token` for each token that they serve.
    """
    saved = api.per_token(demand) - price_per_token
    return price_per_day / saved if saved > 0 else math.inf
