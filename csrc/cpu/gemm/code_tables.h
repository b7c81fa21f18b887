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
  int num_parts;
  bool is_signed;  // bit 7 of a byte is the sign of its value

  explicit CodeTables(const GroupedLinearArgs& args)
      : num_parts(1), is_signed(args.bits == 8 && args.zeros == nullptr) {
    const int entries = args.bits == 4 ? kNibbleEntries : args.zeros != nullptr ? 2 * kByteEntries : kByteEntries;
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
};

}  // namespace shardline::SHARDLINE_ISA
