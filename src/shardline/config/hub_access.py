"""How the hub is asked for models, and where its files go."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class HubAccess:
    """None: as huggingface_hub does by itself, with HF_TOKEN and HF_HUB_CACHE."""

    token: str | None = field(default=None, repr=False)
    folder: str | None = None
    """The cache of downloaded files."""


USUAL_ACCESS = HubAccess()
