// Turns codes into pairs of bf16 in registers, 16 columns and 8 values of k at a time: one shuffle looks up 32 values.
#pragma once

#include "gemm/code_tables.h"

namespace shardline::SHARDLINE_ISA {

#if defined(__AVX512BW__)

// 4-bit codes. `offset` has kZeroEntry - zero in both halves of each column's lane; it is ignored without kZeros.
template <bool kZeros, int kParts>
class NibbleDecoder {
 public:
  static constexpr int64_t kBits = 4;
  static constexpr int kNumParts = kParts;
  static constexpr bool kHasZeros = kZeros;

  explicit NibbleDecoder(const CodeTables& tables) {
    for (int part = 0; part < kParts; ++part) tables_[part] = _mm512_load_si512(tables.parts[part]);
  }

  // Pairs of the four steps of an octet, each with its parts, for columns [16 v, 16 v + 16).
  inline void decode(const uint8_t* octet, int64_t v, I32 offset, I32 (&pairs)[4 * kParts]) const {
    const __m512i codes = _mm512_loadu_si512(octet + v * 64);
#pragma GCC unroll 4
    for (int step = 0; step < 4; ++step) {
      // A lookup reads five bits of a word. Without zero points, the fifth selects between equal halves of the table.
      __m512i index = _mm512_srli_epi16(codes, static_cast<unsigned>(4 * step));
      if (kZeros) index = _mm512_add_epi16(_mm512_and_si512(index, _mm512_set1_epi16(15)), (__m512i)offset);
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
        pairs[step * kParts + part] = (I32)_mm512_permutexvar_epi16(index, tables_[part]);
      }
    }
  }

 private:
  __m512i tables_[kParts];
};

#endif

#if defined(__AVX512VBMI__)

// 8-bit codes; kSigned: bit 7 is the sign.
template <bool kSigned>
class ByteDecoder {
 public:
  static constexpr int64_t kBits = 8;
  static constexpr int kNumParts = 1;
  static constexpr bool kHasZeros = false;

  explicit ByteDecoder(const CodeTables& tables) {
    uint8_t low[kByteEntries], high[kByteEntries];
    for (int i = 0; i < kByteEntries; ++i) {
      low[i] = static_cast<uint8_t>(tables.parts[0][i]);
      high[i] = static_cast<uint8_t>(tables.parts[0][i] >> 8);
    }
    for (int i = 0; i < kRegisters; ++i) {
      low_[i] = _mm512_loadu_si512(low + i * 64);
      high_[i] = _mm512_loadu_si512(high + i * 64);
    }
  }

  inline void decode(const uint8_t* octet, int64_t v, I32, I32 (&pairs)[4]) const {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512i codes = _mm512_loadu_si512(octet + half * 256 + v * 64);
      __m512i low = _mm512_permutex2var_epi8(low_[0], codes, low_[1]);
      __m512i high = _mm512_permutex2var_epi8(high_[0], codes, high_[1]);
      if constexpr (kSigned) {
        constexpr int kOrAnd = 0xf8;  // a | (b & c)
        high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(-128), kOrAnd);
      } else {
        const __mmask64 upper = _mm512_movepi8_mask(codes);
        low = _mm512_mask_blend_epi8(upper, low, _mm512_permutex2var_epi8(low_[2], codes, low_[3]));
        high = _mm512_mask_blend_epi8(upper, high, _mm512_permutex2var_epi8(high_[2], codes, high_[3]));
      }
      pairs[half * 2] = (I32)_mm512_unpacklo_epi8(low, high);
      pairs[half * 2 + 1] = (I32)_mm512_unpackhi_epi8(low, high);
    }
  }

 private:
  static constexpr int kRegisters = kSigned ? 2 : 4;
  __m512i low_[kRegisters], high_[kRegisters];
};

#endif

}  // namespace shardline::SHARDLINE_ISA
