"""Process titles, so that `ps`, `top` and `nvidia-smi` tell the front, the engines and the ranks apart."""

from __future__ import annotations

import setproctitle


def set_process_title(role: str) -> None:
    """Show this process as `shardline: ROLE`, for example `shardline: engine 0`."""
    setproctitle.setproctitle(f"shardline: {role}")
