#include "runtime/arena.h"

#include <sys/mman.h>

#include <new>

namespace shardline {
namespace {

constexpr size_t kAlignment = 64, kHugePage = size_t{2} << 20, kLeastChunk = size_t{32} << 20;

size_t rounded(size_t num_bytes, size_t unit) { return (num_bytes + unit - 1) / unit * unit; }

size_t block_size(size_t num_bytes) { return num_bytes == 0 ? kAlignment : rounded(num_bytes, kAlignment); }

}  // namespace

const std::shared_ptr<Arena>& Arena::of_this_thread() {
  thread_local const std::shared_ptr<Arena> arena = std::make_shared<Arena>();
  return arena;
}

Arena::~Arena() {
  for (const Chunk& chunk : chunks_) munmap(chunk.memory, chunk.size);
}

void Arena::grow(size_t num_bytes) {
  const size_t size = rounded(num_bytes < kLeastChunk ? kLeastChunk : num_bytes, kHugePage);
  // Maps one huge page more than needed, so that the chunk can begin at a huge page.
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* memory = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, kFlags, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  chunks_.push_back({memory, size + kHugePage});
  char* begin = reinterpret_cast<char*>(rounded(reinterpret_cast<size_t>(memory), kHugePage));
#ifdef MADV_HUGEPAGE
  madvise(begin, size, MADV_HUGEPAGE);  // only for speed
#endif
  free_.emplace(begin, size);
}

void* Arena::take(size_t num_bytes) {
  const size_t size = block_size(num_bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  auto range = free_.begin();
  while (range != free_.end() && range->second < size) ++range;
  if (range == free_.end()) {
    grow(size);
    for (range = free_.begin(); range->second < size;) ++range;
  }
  const auto [place, available] = *range;
  free_.erase(range);
  if (available > size) free_.emplace(place + size, available - size);
  used_ += size;
  return place;
}

bool Arena::take_at(void* block, size_t num_bytes) {
  char* place = static_cast<char*>(block);
  const size_t size = block_size(num_bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  auto range = free_.upper_bound(place);
  if (range == free_.begin()) return false;
  --range;
  const auto [begin, available] = *range;
  if (begin + available < place + size) return false;
  if (begin < place) {
    range->second = static_cast<size_t>(place - begin);
  } else {
    free_.erase(range);
  }
  const size_t rest = static_cast<size_t>(begin + available - (place + size));
  if (rest > 0) free_.emplace(place + size, rest);
  used_ += size;
  return true;
}

void Arena::give_back(void* block, size_t num_bytes) {
  char* place = static_cast<char*>(block);
  size_t size = block_size(num_bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  used_ -= size;
  auto next = free_.lower_bound(place);
  if (next != free_.end() && place + size == next->first) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == place) {
      previous->second += size;
      return;
    }
  }
  free_.emplace_hint(next, place, size);
}

size_t Arena::used_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

}  // namespace shardline
