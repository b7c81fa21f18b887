// Copies of KV blocks to other memory and back, with a checksum over all their bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shardline {

constexpr size_t kChecksumLanes = 16;

struct Piece {
  unsigned char* data;
  size_t size;
};

// Copy pieces of memory to `slot`, one behind the other, or back. All return the checksum of the slot's bytes, which
// depends neither on the bounds of the pieces nor on the ISA.
uint64_t copy_out(const std::vector<Piece>& pieces, unsigned char* slot);
uint64_t copy_in(const unsigned char* slot, const std::vector<Piece>& pieces);
uint64_t checksum(const unsigned char* memory, size_t size);

}  // namespace shardline
