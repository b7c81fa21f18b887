"""What OLMo 2, OLMo 3 and EXAONE 4 share: layers whose only norms are after their blocks."""

from __future__ import annotations

from collections.abc import Mapping

from shardline.models.llama_layout import FOUR_NORM_LAYER_KEYS
from shardline.models.spec import GQA, Dense, Layer, Norm

POST_NORM_LAYER_KEYS: Mapping[str, str] = {
    part: key for part, key in FOUR_NORM_LAYER_KEYS.items() if part not in ("attention_norm", "feed_forward_norm")
}
"""See `llama_layout.LAYER_KEYS`."""


def post_norm_layer(attention: GQA, feed_forward: Dense, norm: Norm) -> Layer:
    """A layer with the norm `norm` after each of its two blocks."""
    return Layer(attention, feed_forward, None, None, post_attention_norm=norm, post_feed_forward_norm=norm)
