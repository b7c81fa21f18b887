#include "runtime/short_exponents.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "dispatch/kernels.h"

namespace shardline {
namespace {

constexpr uint32_t kNumCodes = 15;

struct Header {
  uint32_t base;
  uint32_t num_others;  // behind the header, a word's index << 8 | its exponent
};

uint16_t word_at(const unsigned char* memory, size_t index) {
  uint16_t word;
  std::memcpy(&word, memory + index * sizeof(word), sizeof(word));
  return word;
}

uint32_t exponent_of(uint16_t word) { return word >> 7 & 0xff; }

// The first of the 15 exponents, above 0, that most words have.
uint32_t choose_base(const uint32_t* counts) {
  uint32_t best = 1;
  uint64_t most = 0;
  for (uint32_t base = 1; base + kNumCodes <= 256; ++base) {
    uint64_t sum = 0;
    for (uint32_t code = 0; code < kNumCodes; ++code) sum += counts[base + code];
    if (sum > most) {
      most = sum;
      best = base;
    }
  }
  return best;
}

}  // namespace

size_t shorten_exponents(const unsigned char* memory, size_t size, unsigned char* stored) {
  const size_t num_words = size / sizeof(uint16_t);
  uint32_t counts[256] = {};
  for (size_t i = 0; i < num_words; ++i) ++counts[exponent_of(word_at(memory, i))];
  Header header = {choose_base(counts), static_cast<uint32_t>(num_words) - counts[0]};
  for (uint32_t code = 0; code < kNumCodes; ++code) header.num_others -= counts[header.base + code];

  const size_t blocks_size = num_words / kBlockWords * kBlockBytes;
  const size_t used = sizeof(header) + header.num_others * sizeof(uint32_t) + blocks_size;
  const size_t stored_size = (used + kStoredUnit - 1) / kStoredUnit * kStoredUnit;
  if (stored_size > size / 8 * 7) return 0;
  std::memset(stored, 0, stored_size);
  unsigned char* others = stored + sizeof(header);
  unsigned char* blocks = stored + stored_size - blocks_size;
  std::memcpy(stored, &header, sizeof(header));
  for (size_t i = 0; i < num_words; ++i) {
    const uint16_t word = word_at(memory, i);
    const uint32_t exponent = exponent_of(word);
    const uint32_t code = std::min(exponent - header.base, kNumCodes);  // what is below the base wraps round
    if (code == kNumCodes && exponent != 0) {
      const uint32_t other = static_cast<uint32_t>(i) << 8 | exponent;
      std::memcpy(others, &other, sizeof(other));
      others += sizeof(other);
    }
    unsigned char* block = blocks + i / kBlockWords * kBlockBytes;
    const size_t place = i % kBlockWords;
    block[place % (kBlockWords / 2)] |= static_cast<unsigned char>(place < kBlockWords / 2 ? code : code << 4);
    block[kBlockWords / 2 + place] = static_cast<unsigned char>((word >> 8 & 0x80) | (word & 0x7f));
  }
  return stored_size;
}

bool restore_exponents(unsigned char* memory, size_t size, size_t stored_size) {
  const size_t num_words = size / sizeof(uint16_t);
  const size_t blocks_size = num_words / kBlockWords * kBlockBytes;
  Header header;
  if (stored_size > size || stored_size < blocks_size + sizeof(header)) return false;
  const unsigned char* stored = memory + size - stored_size;
  std::memcpy(&header, stored, sizeof(header));
  if (header.base + kNumCodes > 256) return false;
  if (header.num_others > (stored_size - blocks_size - sizeof(header)) / sizeof(uint32_t)) return false;
  std::vector<uint32_t> others(header.num_others);
  if (!others.empty()) std::memcpy(others.data(), stored + sizeof(header), others.size() * sizeof(uint32_t));
  kernels().restore_words(memory, memory + size - blocks_size, static_cast<int64_t>(num_words / kBlockWords),
                          static_cast<int>(header.base));
  for (const uint32_t other : others) {
    const size_t place = other >> 8;
    if (place >= num_words) return false;
    const auto word = static_cast<uint16_t>((word_at(memory, place) & 0x807f) | (other & 0xff) << 7);
    std::memcpy(memory + place * sizeof(word), &word, sizeof(word));
  }
  return true;
}

}  // namespace shardline
