#include "runtime/thread_pool.h"

#include <atomic>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "runtime/pulse.h"
#include "runtime/wait.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace shardline {
namespace {

// This is long enough to bridge the gaps between the ops of one step (about 200 us), and short enough to free an idle
// core.
constexpr int kSpinIterations = 20000;
constexpr int64_t kSleepSliceNs = 1000000000;

#if defined(__linux__)
cpu_set_t process_cpus() {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  sched_getaffinity(0, sizeof cpus, &cpus);
  return cpus;
}
// Read at import: a new thread inherits its creator's mask, which may be a single pinned CPU by then.
const cpu_set_t kProcessCpus = process_cpus();

void set_thread_cpu(const std::vector<int>& pin, size_t index) {
  cpu_set_t cpus = kProcessCpus;
  if (!pin.empty()) {
    CPU_ZERO(&cpus);
    CPU_SET(pin[index], &cpus);
  }
  if (pthread_setaffinity_np(pthread_self(), sizeof cpus, &cpus) != 0 && !pin.empty() && index == 0) {
    throw std::invalid_argument("cannot pin a thread to CPU " + std::to_string(pin[index]));
  }
}
#else
void set_thread_cpu(const std::vector<int>&, size_t) {}
#endif

class ThreadPool {
 public:
  ThreadPool(int num_threads, const std::vector<int>& pin) : shares_(static_cast<size_t>(num_threads)) {
    for (int index = 1; index < num_threads; ++index) {
      workers_.emplace_back([this, pin, index] {
        set_thread_cpu(pin, static_cast<size_t>(index));
        work(static_cast<size_t>(index));
      });
    }
  }

  ~ThreadPool() {
    stop_.store(true);
    announce();
    for (std::thread& worker : workers_) worker.join();
  }

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // A round is opened, then the caller and every worker that comes in time work on it, then it is closed. A worker that
  // is late (asleep, or without a core) finds the round closed, so the caller never waits for a worker that did not
  // enter.
  void run(int64_t num_tasks, TaskFunction function, void* context) {
    function_ = function;
    context_ = context;
    const int64_t num_shares = static_cast<int64_t>(shares_.size());
    for (int64_t s = 0; s < num_shares; ++s) {
      shares_[static_cast<size_t>(s)].next.store(num_tasks * s / num_shares, std::memory_order_relaxed);
      shares_[static_cast<size_t>(s)].end = num_tasks * (s + 1) / num_shares;
    }
    error_ = nullptr;
    {
      // Also if a task of the caller throws: workers still use the context, which it would take along.
      struct Closing {
        ThreadPool& pool;
        ~Closing() { pool.close_round(); }
      } closing{*this};
      open_.store(true);
      announce();
      take_tasks(0);
    }
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  void close_round() {
    open_.store(false);
    for (int spin = 0; active_.load() != 0; ++spin) {
      if (spin < kSpinIterations) {
        cpu_pause();
        continue;
      }
      caller_sleeps_.store(true);
      if (uint32_t active = active_.load()) wait_on_word(&active_, active, kSleepSliceNs, WordScope::kProcess);
      caller_sleeps_.store(false);
    }
  }

  // Consecutive tasks. They mostly read consecutive memory, so each thread streams through a part of its own.
  struct alignas(128) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  // Takes the tasks of the thread's own share first, then tasks that other threads have not begun.
  void take_tasks(size_t self) {
    for (size_t offset = 0; offset < shares_.size(); ++offset) {
      Share& share = shares_[(self + offset) % shares_.size()];
      for (;;) {
        const int64_t task = share.next.fetch_add(1, std::memory_order_relaxed);
        if (task >= share.end) break;
        function_(context_, task);
      }
    }
  }

  void announce() {
    round_.fetch_add(1);
    if (sleepers_.load() != 0) wake_all(&round_, WordScope::kProcess);
  }

  void wait_for_round(uint32_t seen) {
    for (int spin = 0; spin < kSpinIterations; ++spin) {
      if (round_.load() != seen) return;
      cpu_pause();
    }
    sleepers_.fetch_add(1);
    while (round_.load() == seen) wait_on_word(&round_, seen, kSleepSliceNs, WordScope::kProcess);
    sleepers_.fetch_sub(1);
  }

  void work(size_t self) {
    for (uint32_t seen = 0;;) {
      wait_for_round(seen);
      seen = round_.load();
      if (stop_.load()) return;
      active_.fetch_add(1);
      // The caller waits for workers that entered before it reuses the fields, and throws what one of them has thrown.
      try {
        if (open_.load()) take_tasks(self);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(failing_);
        error_ = std::current_exception();
      }
      if (active_.fetch_sub(1) == 1 && caller_sleeps_.load()) wake_all(&active_, WordScope::kProcess);
    }
  }

  TaskFunction function_ = nullptr;
  void* context_ = nullptr;
  std::mutex failing_;
  std::exception_ptr error_;
  std::vector<Share> shares_;
  std::vector<std::thread> workers_;
  alignas(128) std::atomic<uint32_t> round_{0};
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> open_{false};
  std::atomic<bool> stop_{false};
  alignas(128) std::atomic<uint32_t> active_{0};
  std::atomic<bool> caller_sleeps_{false};
};

thread_local std::unique_ptr<ThreadPool> pool;
// Whether the calling thread runs a task of its pool. Such a thread cannot open a second round.
thread_local bool in_task = false;

struct Scratch {
  void* data = nullptr;
  size_t capacity = 0;
  ~Scratch() { std::free(data); }
};
thread_local Scratch scratch;

}  // namespace

void run_tasks(int64_t num_tasks, TaskFunction function, void* context) {
  note_work();
  if (pool && num_tasks > 1 && !in_task) {
    struct InTask {
      InTask() { in_task = true; }
      ~InTask() { in_task = false; }
    } marked;
    pool->run(num_tasks, function, context);
    return;
  }
  for (int64_t task = 0; task < num_tasks; ++task) function(context, task);
}

void set_num_threads(int num_threads, const std::vector<int>& pin) {
  if (num_threads < 1) throw std::invalid_argument("num_threads must be at least 1");
  if (!pin.empty() && pin.size() != static_cast<size_t>(num_threads)) {
    throw std::invalid_argument("pin must name one CPU per thread");
  }
  pool.reset();
  if (!pin.empty()) set_thread_cpu(pin, 0);
  if (num_threads > 1) pool = std::make_unique<ThreadPool>(num_threads, pin);
}

int num_threads() { return pool ? pool->num_threads() : 1; }

void* thread_scratch(size_t num_bytes) {
  if (num_bytes > scratch.capacity) {
    std::free(scratch.data);
    scratch.capacity = (num_bytes + 4095) / 4096 * 4096;
    scratch.data = std::aligned_alloc(64, scratch.capacity);
    if (scratch.data == nullptr) {
      scratch.capacity = 0;
      throw std::bad_alloc();
    }
  }
  return scratch.data;
}

}  // namespace shardline
