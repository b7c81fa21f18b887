// Waits for memory that another thread or process will change: spins for a while, then sleeps in the kernel.
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

// Returns when *word != expected, when woken, or after timeout_ns, whichever comes first. It may return earlier.
void wait_on_word(std::atomic<uint32_t>* word, uint32_t expected, int64_t timeout_ns, WordScope scope);
void wake_all(std::atomic<uint32_t>* word, WordScope scope);

int64_t monotonic_ns();
int allowed_cpus();

// What the waiters of one group share. The memory is shared and starts filled with zeros.
struct WaitCell {
  std::atomic<uint32_t> word;      // changes at every notify()
  std::atomic<uint32_t> sleepers;  // stays too high after a waiter was killed, which only costs system calls
  std::atomic<uint32_t> aborted;   // 0, or 2 + the rank that gave up; an observer is rank -1
};

enum class WaitStatus { kDone, kTimeout, kAborted, kInterrupted };

// How long one waiter spins before it sleeps: only as long as it pays. If peers answer soon, it grows back to `most`.
// If peers do not run at all because the cores are taken, spinning would only keep them from running.
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
  int64_t deadline_ns;  // on the clock of monotonic_ns()
  Spin* spin;
  bool (*interrupted)();  // called at least every 100 ms; true ends the wait
};

// The deadline of a wait that starts now. A timeout too long to count means no deadline.
int64_t deadline_after(double timeout_s);

void notify(WaitCell* cell);
void abort_waiters(WaitCell* cell, int rank);
// Sleeps until the next notify() after `seen`, but at most for a slice of time.
void sleep_until_notified(WaitCell* cell, uint32_t seen, int64_t deadline_ns);

// Waits until ready() is true. Whoever makes it true must call notify() afterwards.
template <class Ready>
WaitStatus wait_until(WaitCell* cell, const WaitLimits& limits, const Ready& ready) {
  for (int spin = 0; spin < limits.spin->now; ++spin) {
    const bool done = ready();  // first, so that whoever gave up before it made this true is seen
    if (cell->aborted.load(std::memory_order_relaxed) != 0) return WaitStatus::kAborted;
    if (done) return WaitStatus::kDone;
    cpu_pause();
  }
  const int64_t began_ns = monotonic_ns();
  for (;;) {
    cell->sleepers.fetch_add(1);  // before the last check, so that a later notify() sees this sleeper
    const uint32_t seen = cell->word.load();
    const bool done = ready();
    const bool aborted = cell->aborted.load() != 0;
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
