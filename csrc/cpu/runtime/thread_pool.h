// A small pool of threads per calling thread: ranks may be threads of one process, and each has its own pool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shardline {

using TaskFunction = void (*)(void* context, int64_t task);

// Runs tasks 0..num_tasks-1 on the calling thread and its pool, and returns when all are done. If it is called from a
// task, it runs them on the calling thread alone.
void run_tasks(int64_t num_tasks, TaskFunction function, void* context);

// `pin` is empty, or names one CPU per thread, the caller's first.
void set_num_threads(int num_threads, const std::vector<int>& pin);
int num_threads();

// Memory of the running thread, 64-byte aligned. It is valid until the same thread calls this again.
void* thread_scratch(size_t num_bytes);

// Calls body(task) for every task. Results must not depend on which thread runs a task: tasks write disjoint outputs.
template <class Body>
void parallel_for(int64_t num_tasks, const Body& body) {
  const auto run = [](void* context, int64_t task) { (*static_cast<const Body*>(context))(task); };
  run_tasks(num_tasks, run, const_cast<Body*>(&body));
}

// The same, but on the calling thread alone if the work is too small to wake other threads for it.
template <class Body>
void parallel_for_if(bool parallel, int64_t num_tasks, const Body& body) {
  if (parallel) {
    parallel_for(num_tasks, body);
  } else {
    for (int64_t task = 0; task < num_tasks; ++task) body(task);
  }
}

}  // namespace shardline
