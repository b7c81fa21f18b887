// The inner loop of restored exponents.
#include <cstring>

#include "dispatch/variant.h"
#include "runtime/short_exponents.h"

namespace shardline::SHARDLINE_ISA {

// The blocks may lie at the end of the words: 32 bytes a block are written more than read, so words never reach a block
// that is still to be read.
void restore_words(unsigned char* words, const unsigned char* blocks, int64_t num_blocks, int base) {
  constexpr size_t kHalf = kBlockWords / 2;
  const auto first = static_cast<uint16_t>(base);
  for (int64_t index = 0; index < num_blocks; ++index) {
    unsigned char block[kBlockBytes];
    std::memcpy(block, blocks + index * static_cast<int64_t>(sizeof(block)), sizeof(block));
    uint16_t restored[kBlockWords];
    for (size_t i = 0; i < kHalf; ++i) {
      const uint16_t code = block[i] & 15, rest = block[kHalf + i];
      const uint16_t exponent = code == 15 ? 0 : static_cast<uint16_t>(first + code);
      restored[i] = static_cast<uint16_t>((rest & 0x80) << 8 | exponent << 7 | (rest & 0x7f));
    }
    for (size_t i = 0; i < kHalf; ++i) {
      const uint16_t code = block[i] >> 4, rest = block[kBlockWords + i];
      const uint16_t exponent = code == 15 ? 0 : static_cast<uint16_t>(first + code);
      restored[kHalf + i] = static_cast<uint16_t>((rest & 0x80) << 8 | exponent << 7 | (rest & 0x7f));
    }
    std::memcpy(words + index * static_cast<int64_t>(sizeof(restored)), restored, sizeof(restored));
  }
}

}  // namespace shardline::SHARDLINE_ISA
