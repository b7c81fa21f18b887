"""The process that tries kernels: it gets cases over a socket, whose descriptor is its argument, and tells of each."""

from __future__ import annotations

import os
import socket
import sys

import torch

from shardline.channel import Channel
from shardline.deployment.kernel_proofs import CaseBegun, CaseDone, ProveCases
from shardline.kernels.cuda.gpu_kernels import CudaKernels
from shardline.kernels.cuda.proof.trials import problem_of

_MOST_LETTERS = 200
"""Of an error's message."""


def serve(sock: socket.socket) -> None:
    """Try the cases, as long as the GPU's context is sound."""
    channel: Channel[ProveCases] = Channel(sock, ProveCases)
    asked = channel.receive()
    device = torch.device(asked.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    kernels = CudaKernels(device, asked.capability)
    for case in asked.cases:
        channel.send(CaseBegun())
        try:
            with torch.inference_mode():
                problem = problem_of(case, kernels)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            lasts = not isinstance(error, (torch.OutOfMemoryError, MemoryError, OSError))
            channel.send(CaseDone(f"{type(error).__name__}: {lines[0][:_MOST_LETTERS]}", lasts))
            if not _computes(device):
                return
        else:
            channel.send(CaseDone(problem))


def _computes(device: torch.device) -> bool:
    """Whether the device still computes after an exception."""
    try:
        return int(torch.ones(2, device=device).sum()) == 2
    except RuntimeError:
        return False


def main() -> None:
    """Entry point."""
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # the GPU's context may hang at its end
