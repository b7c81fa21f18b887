"""The threads of a rank, when a task fails."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[3] / "csrc" / "cpu"
PROGRAM = r"""
#include <atomic>
#include <new>
#include <thread>

#include "runtime/thread_pool.h"

int main() {
  shardline::set_num_threads(3, {});
  const std::thread::id caller = std::this_thread::get_id();
  for (int round = 0; round < 300; ++round) {
    std::atomic<int> running{0};
    const auto fail = [&](int64_t) {
      if (std::this_thread::get_id() == caller) throw std::bad_alloc();
      running.fetch_add(1);
      std::this_thread::yield();
      running.fetch_sub(1);
    };
    try {
      shardline::parallel_for(64, fail);
      return 1;
    } catch (const std::bad_alloc&) {
      if (running.load() != 0) return 2;  // the tasks of others outlive what they refer to
    }
  }
  std::atomic<bool> was_helped{false};
  for (int round = 0; round < 100000 && !was_helped; ++round) {
    shardline::parallel_for(64, [&](int64_t) {
      std::this_thread::yield();
      if (std::this_thread::get_id() != caller) was_helped = true;
    });
  }
  if (!was_helped) return 3;  // the caller would work alone from now on
  bool was_told = false;
  for (int round = 0; round < 100000 && !was_told; ++round) {
    try {
      shardline::parallel_for(64, [&](int64_t) {
        std::this_thread::yield();
        if (std::this_thread::get_id() != caller) throw std::bad_alloc();
      });
    } catch (const std::bad_alloc&) {
      was_told = true;
    }
  }
  return was_told ? 0 : 4;  // what a worker throws is the caller's
}
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="compiles the pool with a caller of its own")
def test_a_task_that_fails_ends_its_round(tmp_path: Path) -> None:
    (tmp_path / "main.cpp").write_text(PROGRAM)
    sources = [tmp_path / "main.cpp", *(SOURCES / f"runtime/{name}.cpp" for name in ("thread_pool", "wait", "pulse"))]
    program = tmp_path / "main"
    subprocess.run(["c++", "-std=c++17", "-O1", "-pthread", f"-I{SOURCES}", *sources, "-o", program], check=True)
    assert subprocess.run([program], timeout=100).returncode == 0
