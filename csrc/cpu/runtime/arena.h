// Memory for activations, which steps take and give back many times and which stays mapped between steps.
//
// The system's allocator returns large blocks to the kernel at once, so every step would fault their pages in again. A
// recorded step (program.h) needs memory that stays in place. take() returns the lowest block that fits, so that steps
// touch the same few pages.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace shardline {

class Arena {
 public:
  // The calling thread's arena. It lives until the thread and all blocks are gone: ranks may be threads of one process.
  static const std::shared_ptr<Arena>& of_this_thread();

  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;

  // Returns at least `num_bytes`, aligned to 64. Throws std::bad_alloc.
  void* take(size_t num_bytes);
  // Takes the block at exactly this place, if all of it is free.
  bool take_at(void* block, size_t num_bytes);
  void give_back(void* block, size_t num_bytes);  // from any thread
  size_t used_bytes() const;

 private:
  struct Chunk {
    void* memory;
    size_t size;
  };

  void grow(size_t num_bytes);

  mutable std::mutex mutex_;
  std::vector<Chunk> chunks_;
  std::map<char*, size_t> free_;  // size by place; adjacent free blocks are merged
  size_t used_ = 0;
};

}  // namespace shardline
