"""Tests of the C++ code with kernels that a sanitizer watches: `make sanitize` builds them and runs this.

    python -m tests.sanitize address   # ASAN and UBSAN: kernels, packed weights, thread pool, exchanges
    python -m tests.sanitize thread    # TSAN: thread pool and exchanges; of kernels, the portable ones

Python itself is not instrumented, so the sanitizer's library is loaded before it. Leaks are not looked for: Python's
own would hide ours.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = {"address": ["libasan.so", "libubsan.so"], "thread": ["libtsan.so"]}
TESTS = {
    "address": [
        "tests/runtime/ops",
        "tests/runtime/parallel/test_exchange.py",
        "tests/runtime/parallel/test_sockets.py",
        "tests/kernels/host",
        "tests/runtime/machines/host",
        "tests/weights",
    ],
    "thread": [
        "tests/runtime/parallel/test_exchange.py",
        "tests/runtime/parallel/test_sockets.py",
        "tests/runtime/ops/moe/test_routing.py",
    ],
}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:use_sigaltstack=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1:report_signal_unsafe=0",
}


def link_package(folder: Path) -> Path:
    """A folder like src/, of links, but for the extension of the build in `folder`."""
    source = folder / "src"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(
        ROOT / "src", source, copy_function=os.symlink, ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    (extension,) = folder.glob("_cpu*.so")
    (source / "shardline" / extension.name).symlink_to(extension)
    return source


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", choices=LIBRARIES)
    parser.add_argument("tests", nargs="*", help="these instead of the usual ones")
    arguments = parser.parse_args()
    names = LIBRARIES[arguments.build]
    libraries = [subprocess.check_output(["c++", f"-print-file-name={name}"], text=True).strip() for name in names]
    environment = {
        **os.environ,
        **OPTIONS,
        "LD_PRELOAD": ":".join(libraries),
        "PYTHONPATH": str(link_package(ROOT / "build/sanitize" / arguments.build)),
    }
    tests = arguments.tests or TESTS[arguments.build]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--timeout=0", "-x", "-s", *tests]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
