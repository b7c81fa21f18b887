// The inner loop of checksums.
#include <cstring>

#include "dispatch/variant.h"
#include "runtime/checked_copy.h"

namespace shardline::SHARDLINE_ISA {

// Each step of a lane maps its states one to one for a given word, so a change within one word of a lane always changes
// the lane; others go unseen once in 2^64. Shifts and adds only: vectors of 64-bit words have no product before
// AVX-512.
void hash_stripes(uint64_t* lanes, const unsigned char* memory, int64_t num_stripes) {
  uint64_t state[kChecksumLanes];
  std::memcpy(state, lanes, sizeof(state));
  for (int64_t stripe = 0; stripe < num_stripes; ++stripe) {
    uint64_t words[kChecksumLanes];
    std::memcpy(words, memory + stripe * static_cast<int64_t>(sizeof(words)), sizeof(words));
    for (size_t i = 0; i < kChecksumLanes; ++i) {
      const uint64_t changed = state[i] ^ words[i];
      const uint64_t turned = changed << 29 | changed >> 35;
      state[i] = turned + (turned << 3);
    }
  }
  std::memcpy(lanes, state, sizeof(state));
}

}  // namespace shardline::SHARDLINE_ISA
