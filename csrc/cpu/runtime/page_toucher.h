// Takes memory from the system before it is needed, in a thread that needs no Python.
#pragma once

#include <atomic>
#include <cstddef>
#include <thread>

namespace shardline {

class PageToucher {
 public:
  // Begins with the first page. What lies in the memory stays as it is, also what others write meanwhile.
  PageToucher(void* memory, size_t num_bytes);
  ~PageToucher() { stop(); }
  PageToucher(const PageToucher&) = delete;

  void stop();
  void wait();  // until all is touched, or it was stopped

 private:
  std::atomic<bool> stopped_{false};
  std::thread thread_;
};

}  // namespace shardline
