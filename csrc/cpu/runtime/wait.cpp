#include "runtime/wait.h"

#include <ctime>

#include <algorithm>
#include <thread>

#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#endif

namespace shardline {

static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free,
              "a futex word must be a plain 32-bit integer");

#if defined(__linux__)

void wait_on_word(std::atomic<uint32_t>* word, uint32_t expected, int64_t timeout_ns, WordScope scope) {
  const int operation = scope == WordScope::kProcess ? FUTEX_WAIT_PRIVATE : FUTEX_WAIT;
  timespec timeout{static_cast<time_t>(timeout_ns / 1000000000), static_cast<long>(timeout_ns % 1000000000)};
  syscall(SYS_futex, word, operation, expected, &timeout, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>* word, WordScope scope) {
  const int operation = scope == WordScope::kProcess ? FUTEX_WAKE_PRIVATE : FUTEX_WAKE;
  syscall(SYS_futex, word, operation, INT32_MAX, nullptr, nullptr, 0);
}

#else

// There is no portable futex between processes, so poll with short sleeps.
void wait_on_word(std::atomic<uint32_t>* word, uint32_t expected, int64_t timeout_ns, WordScope) {
  if (word->load() == expected) usleep(static_cast<useconds_t>(std::min<int64_t>(timeout_ns / 1000 + 1, 100)));
}

void wake_all(std::atomic<uint32_t>*, WordScope) {}

#endif

int64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

int allowed_cpus() {
#if defined(__linux__)
  cpu_set_t cpus;
  if (sched_getaffinity(0, sizeof cpus, &cpus) == 0) return CPU_COUNT(&cpus);
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int64_t deadline_after(double timeout_s) {
  constexpr double kForeverS = 1e9;
  return timeout_s < kForeverS ? monotonic_ns() + static_cast<int64_t>(timeout_s * 1e9) : INT64_MAX;
}

void notify(WaitCell* cell) {
  cell->word.fetch_add(1);
  if (cell->sleepers.load() != 0) wake_all(&cell->word, WordScope::kShared);
}

void abort_waiters(WaitCell* cell, int rank) {
  uint32_t not_aborted = 0;  // the first rank that gives up is the one that errors name
  cell->aborted.compare_exchange_strong(not_aborted, static_cast<uint32_t>(rank + 2));
  cell->word.fetch_add(1);
  wake_all(&cell->word, WordScope::kShared);
}

void sleep_until_notified(WaitCell* cell, uint32_t seen, int64_t deadline_ns) {
  constexpr int64_t kSliceNs = 100000000;
  const int64_t left_ns = deadline_ns - monotonic_ns();
  if (left_ns > 0) wait_on_word(&cell->word, seen, std::min(kSliceNs, left_ns), WordScope::kShared);
}

}  // namespace shardline
