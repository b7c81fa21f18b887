// Takes memory from the system before it is needed, in a thread that needs no Python.
#pragma once

#include <atomic>
#include <cstddef>
#include <thread>

namespace shardline {

class PageToucher {
 public:
  // Begins with the first page. The contents of the memory stay, also what others write meanwhile.
  PageToucher(void* memory, size_t num_bytes);
  ~PageToucher() { stop(); }
  PageToucher(const PageToucher&) = delete;

  void stop();
  void wait();  // until all pages are touched, or stop() was called

 private:
  std::atomic<bool> stopped_{false};
  std::thread thread_;
};

}  // namespace shardline
