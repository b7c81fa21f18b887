// The values of codes, as the products read them.
#pragma once

#include "gemm/gemm_args.h"
#include "simd/vec.h"

namespace shardline::SHARDLINE_ISA {

constexpr int kMaxParts = 2;
constexpr int kNibbleEntries = 32, kByteEntries = 256;

// With zero points, a code selects the entry code + zero_entry - zero, whose value is code - zero.
constexpr int zero_entry(int64_t bits) { return 1 << bits; }

// The bits of the nearest bf16, to even on ties; NaN stays NaN. (vec.h has it for vectors.)
inline uint16_t rounded_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// A value is the sum of its parts, each a bf16. Without zero points, both halves of a table of nibbles are equal.
struct CodeTables {
  alignas(64) uint16_t parts[kMaxParts][2 * kByteEntries];
  alignas(64) float values[2 * kByteEntries];
  int64_t bits;
  int num_parts;
  bool is_signed;  // bit 7 of a byte is the sign of its value

  explicit CodeTables(const GroupedLinearArgs& args)
      : bits(args.bits), num_parts(1), is_signed(args.bits == 8 && args.zeros == nullptr) {
    const int entries = args.bits == 4 ? kNibbleEntries : 1 << (args.bits + (args.zeros != nullptr ? 1 : 0));
    for (int i = 0; i < entries; ++i) {
      values[i] = args.zeros != nullptr ? static_cast<float>(i - zero_entry(args.bits))
                                        : args.table[i & ((1 << args.bits) - 1)];
    }
    for (int i = 0; i < entries; ++i) {
      parts[0][i] = rounded_bits(values[i]);
      const float rest = values[i] - to_float(bf16{parts[0][i]});
      parts[1][i] = rest == rest ? rounded_bits(rest) : 0;
    }
    for (int i = 0; i < entries; ++i) num_parts = (parts[1][i] & 0x7fff) != 0 ? 2 : num_parts;
    for (int i = 0; i < entries / 2 && is_signed; ++i) is_signed = (parts[0][i] ^ 0x8000) == parts[0][i + 128];
  }

  // Whether codes stand for code + values[0], integers that bf16 holds.
  bool is_integers() const {
    constexpr float kMost = 256.0f;
    const int last = (1 << bits) - 1;
    if (!(values[0] >= -kMost && values[last] <= kMost) || __builtin_truncf(values[0]) != values[0]) return false;
    for (int i = 1; i <= last; ++i) {
      if (values[i] != values[0] + static_cast<float>(i)) return false;
    }
    return true;
  }

  // Whether bytes are in float8_e4m3fn.
  bool is_e4m3() const {
    const float* table = e4m3_table();
    for (int i = 0; i < kByteEntries; ++i) {
      if (!(values[i] == table[i] || (values[i] != values[i] && table[i] != table[i]))) return false;
    }
    return true;
  }
};

// Which bytes or bits of words of 64 bits are the 6-bit codes of kBytes / 4 columns: for even and odd columns of 16 in
// turn, and each pair of k. See gemm_args.h.
template <int kBytes>
struct SixBitPlaces {
  alignas(kBytes) uint8_t of_step[2][4][kBytes];
};

// The byte, of 16, that becomes byte i; each two have a code somewhere in them.
template <int kBytes>
constexpr SixBitPlaces<kBytes> six_bit_byte_places() {
  constexpr int kFirst[4] = {0, 0, 1, 2};
  SixBitPlaces<kBytes> places = {};
  for (int odd = 0; odd < 2; ++odd) {
    for (int step = 0; step < 4; ++step) {
      for (int i = 0; i < kBytes; ++i) {
        const int byte = step * 3 + odd * 4 + kFirst[i % 8 / 2] + i % 2;
        places.of_step[odd][step][i] = static_cast<uint8_t>(i % 16 / 8 * 8 + byte % 8);
      }
    }
  }
  return places;
}

// The first bit, of 64, of byte i; each two begin with a code.
template <int kBytes>
constexpr SixBitPlaces<kBytes> six_bit_bit_places() {
  SixBitPlaces<kBytes> places = {};
  for (int odd = 0; odd < 2; ++odd) {
    for (int step = 0; step < 4; ++step) {
      for (int i = 0; i < kBytes; ++i) {
        places.of_step[odd][step][i] = static_cast<uint8_t>((step * 24 + odd * 32 + i % 8 / 2 * 6) % 64);
      }
    }
  }
  return places;
}

}  // namespace shardline::SHARDLINE_ISA
