"""The devices of one kind that torch finds: `python -m shardline.kernels.torch.devices xpu` prints a line for each."""

from __future__ import annotations

import json
import sys

import torch


def main() -> None:
    """Print the name, all bytes of memory, the free ones and the capability of each device as JSON."""
    kind = sys.argv[1]
    module = torch.get_device_module(kind)
    for index in range(module.device_count() if module.is_available() else 0):
        if kind == "mps":  # its memory is the host's
            total = torch.mps.recommended_max_memory()
            print(json.dumps(["Apple GPU", total, total - torch.mps.driver_allocated_memory(), ""]))
        else:
            free, total = module.mem_get_info(index)
            print(json.dumps([module.get_device_name(index), total, free, _capability(kind, index)]))


def _capability(kind: str, index: int) -> str:
    """See `deployment.machine.Device`."""
    if kind != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is None:
        return f"sm_{properties.major}{properties.minor}"
    # As "gfx90a:sramecc+:xnack-".
    return str(properties.gcnArchName).partition(":")[0]


if __name__ == "__main__":
    main()
