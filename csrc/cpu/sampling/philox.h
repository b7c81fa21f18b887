// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"): a random number is a function of a
// counter and a key, so that a token's draw does not depend on earlier draws.
#pragma once

#include <array>
#include <cstdint>

namespace shardline {

inline std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(product0)};
    key = {key[0] + 0x9E3779B9, key[1] + 0xBB67AE85};
  }
  return counter;
}

// A double in [0, 1) with 53 random bits.
inline double uniform(uint64_t seed, uint32_t choice, uint64_t position, uint32_t purpose) {
  const auto words =
      philox4x32({static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), choice, purpose},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return static_cast<double>((uint64_t{words[0]} << 32 | words[1]) >> 11) * 0x1.0p-53;
}

}  // namespace shardline
