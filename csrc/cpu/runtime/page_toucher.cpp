#include "runtime/page_toucher.h"

namespace shardline {

PageToucher::PageToucher(void* memory, size_t num_bytes) {
  thread_ = std::thread([this, first = static_cast<char*>(memory), num_bytes] {
    constexpr size_t kSmallestPage = 4096;
    for (size_t offset = 0; offset < num_bytes && !stopped_.load(std::memory_order_relaxed); offset += kSmallestPage) {
      // Only a write takes a page. This one changes nothing: it replaces a zero by a zero.
      char zero = 0;
      __atomic_compare_exchange_n(first + offset, &zero, char{0}, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }
  });
}

void PageToucher::stop() {
  stopped_.store(true, std::memory_order_relaxed);
  wait();
}

void PageToucher::wait() {
  if (thread_.joinable()) thread_.join();
}

}  // namespace shardline
