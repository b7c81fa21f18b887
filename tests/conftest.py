"""Options of the suite, and Triton's interpreter.

Triton decides as it is imported, and as kernels are, whether they run in its interpreter; others import it too
(transformers does), so it comes first. Children decide anew.
"""

from __future__ import annotations

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"
import triton.experimental.gluon
import triton.language  # noqa: F401

import shardline.runtime.ops.triton  # noqa: F401

del os.environ["TRITON_INTERPRET"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-matrix",
        action="store_true",
        help="exactness: the full product of the axes instead of a pairwise sample",
    )
