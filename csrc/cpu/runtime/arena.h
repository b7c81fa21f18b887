// Memory for activations: taken and given back many times a step, kept between steps.
//
// The system's allocator returns large blocks to the kernel at once, so that every step would fault its pages in again;
// and a recorded step (program.h) needs memory that stays where it was. Blocks are the lowest that fit, so that steps
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
  // The calling thread's, which lives until the thread and all blocks are gone: ranks may be threads of one process.
  static const std::shared_ptr<Arena>& of_this_thread();

  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;

  // At least `num_bytes`, aligned to 64. Throws std::bad_alloc.
  void* take(size_t num_bytes);
  // Takes a block at this very place, if all of it is free.
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
  std::map<char*, size_t> free_;  // by place; neighbours are merged
  size_t used_ = 0;
};

}  // namespace shardline
