#include "runtime/checked_copy.h"

#include <algorithm>
#include <cstring>

#include "dispatch/kernels.h"

namespace shardline {
namespace {

// Bytes that are copied and hashed at a time, so that the second pass finds them in the cache.
constexpr size_t kPart = 1 << 15;
constexpr size_t kStripe = kChecksumLanes * sizeof(uint64_t);

// The checksum of memory that fills up.
class Checksum {
 public:
  // The first `end` bytes of `memory` are there.
  void advance(const unsigned char* memory, size_t end) {
    const size_t num_stripes = (end - num_hashed_) / kStripe;
    kernels().hash_stripes(lanes_, memory + num_hashed_, static_cast<int64_t>(num_stripes));
    num_hashed_ += num_stripes * kStripe;
  }

  // All `size` bytes are there. Like the lanes, each step of the fold maps states one to one.
  uint64_t finish(const unsigned char* memory, size_t size) {
    advance(memory, size);
    if (num_hashed_ < size) {
      unsigned char last[kStripe] = {};
      std::memcpy(last, memory + num_hashed_, size - num_hashed_);
      kernels().hash_stripes(lanes_, last, 1);
    }
    uint64_t sum = size;
    for (const uint64_t lane : lanes_) {
      sum = ((sum << 23 | sum >> 41) ^ lane) * 0x9e3779b97f4a7c15u;
      sum ^= sum >> 32;
    }
    return sum;
  }

 private:
  uint64_t lanes_[kChecksumLanes] = {};
  size_t num_hashed_ = 0;
};

}  // namespace

uint64_t copy_out(const std::vector<Piece>& pieces, unsigned char* slot) {
  Checksum sum;
  size_t end = 0;
  for (const Piece& piece : pieces) {
    for (size_t done = 0; done < piece.size;) {
      const size_t count = std::min(kPart, piece.size - done);
      std::memcpy(slot + end, piece.data + done, count);
      done += count;
      end += count;
      sum.advance(slot, end);
    }
  }
  return sum.finish(slot, end);
}

uint64_t copy_in(const unsigned char* slot, const std::vector<Piece>& pieces) {
  Checksum sum;
  size_t end = 0;
  for (const Piece& piece : pieces) {
    for (size_t done = 0; done < piece.size;) {
      const size_t count = std::min(kPart, piece.size - done);
      std::memcpy(piece.data + done, slot + end, count);
      done += count;
      end += count;
      sum.advance(slot, end);
    }
  }
  return sum.finish(slot, end);
}

uint64_t checksum(const unsigned char* memory, size_t size) { return Checksum().finish(memory, size); }

}  // namespace shardline
