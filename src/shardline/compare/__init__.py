"""Two endpoints side by side: where their answers first differ, how likely each token was, and how fast they are."""

from shardline.compare.answers import Endpoint
from shardline.compare.comparison import Comparison, compare

__all__ = ["Comparison", "Endpoint", "compare"]
