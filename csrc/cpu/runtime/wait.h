// Waiting for memory that another thread or process will change: spin for a while, then sleep in the kernel.
#pragma once

#include <atomic>
#include <cstdint>

namespace shardline {

enum class WordScope { kProcess, kShared };  // kShared: the word may be mapped by several processes

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns when *word != expected, when woken, or after timeout_ns, whichever is first; may return early.
void wait_on_word(std::atomic<uint32_t>* word, uint32_t expected, int64_t timeout_ns, WordScope scope);
void wake_all(std::atomic<uint32_t>* word, WordScope scope);

int64_t monotonic_ns();
int allowed_cpus();

// What waiters of one group share, in zero-filled shared memory.
struct WaitCell {
  std::atomic<uint32_t> word;      // changes at every notify()
  std::atomic<uint32_t> sleepers;  // may stay too high after a waiter was killed: that costs a system call, no more
  std::atomic<uint32_t> aborted;   // 0, or 2 + the rank that gave up (1: an observer)
};

enum class WaitStatus { kDone, kTimeout, kAborted, kInterrupted };

// How long one waiter spins before it sleeps: no longer than pays off. Where peers answer soon it grows back to `most`;
// where they do not run at all, because the cores are taken, spinning only keeps them from running.
struct Spin {
  explicit Spin(int iterations) : most(iterations), now(iterations) {}
  void learn(int64_t slept_ns) {
    constexpr int64_t kWorthSpinningNs = 100000;
    constexpr int kLeast = 64;
    now = slept_ns < kWorthSpinningNs ? (now < most / 2 ? 2 * now : most) : now / 2;
    if (now < kLeast) now = kLeast < most ? kLeast : most;
  }
  int most, now;
};

struct WaitLimits {
  int64_t deadline_ns;  // of monotonic_ns()
  Spin* spin;
  bool (*interrupted)();  // asked at least every 100 ms; true gives up
};

// Deadline of a wait that starts now; a timeout too long to count is none.
int64_t deadline_after(double timeout_s);

void notify(WaitCell* cell);
void abort_waiters(WaitCell* cell, int rank);
// Sleeps until the next notify() after `seen`, at most for a slice of time.
void sleep_until_notified(WaitCell* cell, uint32_t seen, int64_t deadline_ns);

// Waits until ready(); whoever makes it true must notify() afterwards.
template <class Ready>
WaitStatus wait_until(WaitCell* cell, const WaitLimits& limits, const Ready& ready) {
  for (int spin = 0; spin < limits.spin->now; ++spin) {
    if (cell->aborted.load(std::memory_order_relaxed) != 0) return WaitStatus::kAborted;
    if (ready()) return WaitStatus::kDone;
    cpu_pause();
  }
  const int64_t began_ns = monotonic_ns();
  for (;;) {
    cell->sleepers.fetch_add(1);  // before the last look, so that a notify() after it knows of us
    const uint32_t seen = cell->word.load();
    const bool aborted = cell->aborted.load() != 0;
    const bool done = !aborted && ready();
    const bool late = monotonic_ns() >= limits.deadline_ns;
    if (!aborted && !done && !late) sleep_until_notified(cell, seen, limits.deadline_ns);
    cell->sleepers.fetch_sub(1);
    if (aborted) return WaitStatus::kAborted;
    if (done) {
      limits.spin->learn(monotonic_ns() - began_ns);
      return WaitStatus::kDone;
    }
    if (late) return WaitStatus::kTimeout;
    if (limits.interrupted()) return WaitStatus::kInterrupted;
  }
}

}  // namespace shardline
