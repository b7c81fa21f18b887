// Turns codes into pairs of bf16 in registers, 16 columns and 8 values of k at a time: one shuffle looks up 32 values.
#pragma once

#include "gemm/code_decoder_avx2.h"
#include "gemm/code_tables.h"
#include "simd/vec_bytes.h"

namespace shardline::SHARDLINE_ISA {

#if defined(__AVX512BW__)

// An octet has four steps, one for each pair of k. So many of them are decoded at once.
constexpr int kSteps = 2;

// 4-bit codes. The offset of a column is zero_entry(4) - zero; it is ignored without kZeros.
template <bool kZeros, int kParts>
class NibbleDecoder {
 public:
  static constexpr int64_t kBits = 4;
  static constexpr int kNumParts = kParts;
  static constexpr bool kHasZeros = kZeros;

  // What `decode` takes for the zero points of 16 columns: their offsets in all bytes of a lane.
  static inline I32 offsets(I32 zeros) { return (broadcast_int(zero_entry(kBits)) - zeros) * 0x01010101; }

  explicit NibbleDecoder(const CodeTables& tables) {
    for (int part = 0; part < kParts; ++part) tables_[part] = _mm512_load_si512(tables.parts[part]);
  }

  // Pairs of the steps [first, first + kSteps) of an octet, each with its parts, for columns [16 v, 16 v + 16).
  inline void decode(const uint8_t* octet, int64_t v, I32 offset, unsigned first, I32 (&pairs)[kSteps * kParts]) const {
    const __m512i codes = _mm512_loadu_si512(octet + v * 64);
    if constexpr (kZeros) {
      const U32 even = ((U32)codes & 0x0f0f0f0fu) + (U32)offset, odd = ((U32)codes >> 4 & 0x0f0f0f0fu) + (U32)offset;
      look_up(_mm512_srli_epi16((__m512i)even, 4 * first), 0, pairs);
      look_up(_mm512_srli_epi16((__m512i)odd, 4 * first), 1, pairs);
    } else {
#pragma GCC unroll 2
      for (unsigned step = 0; step < kSteps; ++step) {
        look_up(_mm512_srli_epi16(codes, 4 * (first + step)), step, pairs);
      }
    }
  }

 private:
  // A lookup reads five bits of a word. Without zero points, the fifth selects between equal halves of the table.
  inline void look_up(__m512i index, unsigned step, I32 (&pairs)[kSteps * kParts]) const {
#pragma GCC unroll 2
    for (unsigned part = 0; part < kParts; ++part) {
      pairs[step * kParts + part] = (I32)_mm512_permutexvar_epi16(index, tables_[part]);
    }
  }

  __m512i tables_[kParts];
};

// 6-bit codes without zero points. Two columns have 24 bits for each pair of k, somewhere in a word of 64 bits, which
// is read as if its end were followed by its beginning.
class SixBitDecoder {
 public:
  static constexpr int64_t kBits = 6;
  static constexpr int kNumParts = 1;
  static constexpr bool kHasZeros = false;

  explicit SixBitDecoder(const CodeTables& tables)
      : low_(_mm512_load_si512(tables.parts[0])), high_(_mm512_load_si512(tables.parts[0] + 32)) {}

  inline void decode(const uint8_t* octet, int64_t v, I32, int first, I32 (&pairs)[kSteps]) const {
    const uint8_t* half = octet + v / 2 * 192;
    const bool odd = v % 2 != 0;
    const __m512i own = _mm512_loadu_si512(half + (odd ? 64 : 0));
    __m512i words[kSteps] = {own, own};
    if (odd == (first == 0)) {
      const __m512i shared = _mm512_loadu_si512(half + 128);
      const __m512i seam = _mm512_mask_blend_epi16(odd ? 0x11111111u : 0x88888888u, shared, own);
      words[0] = odd ? shared : seam;
      words[1] = odd ? seam : shared;
    }
    // A lookup reads six bits of each 16; the other bits do not matter.
#pragma GCC unroll 2
    for (int step = 0; step < kSteps; ++step) {
      const __m512i places = _mm512_load_si512(kPlaces.of_step[odd][first + step]);
      pairs[step] = (I32)_mm512_permutex2var_epi16(low_, pick(places, words[step]), high_);
    }
  }

 private:
#if defined(__AVX512VBMI__)
  static constexpr SixBitPlaces<64> kPlaces = six_bit_bit_places<64>();
  static inline __m512i pick(__m512i places, __m512i words) {
    return _mm512_maskz_multishift_epi64_epi8(~__mmask64{0}, places, words);
  }
#else
  static constexpr SixBitPlaces<64> kPlaces = six_bit_byte_places<64>();
  static inline __m512i pick(__m512i places, __m512i words) {
    return _mm512_srlv_epi16(_mm512_shuffle_epi8(words, places), _mm512_set1_epi64(0x0002000400060000));
  }
#endif

  __m512i low_, high_;
};

// Two pairs of 8-bit codes of columns [16 v, 16 v + 16), those of half an octet, each in 16 bits.
inline void load_byte_codes(const uint8_t* octet, int64_t v, int first, __m512i (&words)[kSteps]) {
  const __m512i zero = _mm512_setzero_si512(), codes = _mm512_loadu_si512(octet + first / kSteps * 256 + v * 64);
  words[0] = _mm512_unpacklo_epi8(codes, zero);
  words[1] = _mm512_unpackhi_epi8(codes, zero);
}

// 8-bit codes that stand for integers: code - zero, or without kZeros code + the first value of the table. No table is
// needed, since an integer of 8 bits and a sign is exact in the upper half of a float.
template <bool kZeros>
class IntegerByteDecoder {
 public:
  static constexpr int64_t kBits = 8;
  static constexpr int kNumParts = 1;
  static constexpr bool kHasZeros = kZeros;

  // The negative zero points in both halves of a lane.
  static inline I32 offsets(I32 zeros) { return -zeros << 16 | (-zeros & 0xffff); }

  explicit IntegerByteDecoder(const CodeTables& tables)
      : first_(_mm512_set1_epi16(static_cast<int16_t>(tables.values[0]))) {}

  inline void decode(const uint8_t* octet, int64_t v, I32 offset, int first, I32 (&pairs)[kSteps]) const {
    __m512i words[kSteps];
    load_byte_codes(octet, v, first, words);
    const __m512i add = kZeros ? (__m512i)offset : first_;
#pragma GCC unroll 2
    for (int step = 0; step < kSteps; ++step) pairs[step] = to_pairs(_mm512_add_epi16(words[step], add));
  }

 private:
  static inline I32 to_pairs(__m512i integers) {
    const F32 even = to_float((I32)integers << 16 >> 16), odd = to_float((I32)integers >> 16);
    return (I32)((U32)even >> 16 | ((U32)odd & 0xffff0000u));
  }

  __m512i first_;
};

// Bytes in float8_e4m3fn, as in code_decoder_avx2.h.
class E4m3Decoder {
 public:
  static constexpr int64_t kBits = 8;
  static constexpr int kNumParts = 1;
  static constexpr bool kHasZeros = false;

  explicit E4m3Decoder(const CodeTables& tables) : small_(_mm512_load_si512(tables.parts[0])) {}

  inline void decode(const uint8_t* octet, int64_t v, I32, int first, I32 (&pairs)[kSteps]) const {
    __m512i words[kSteps];
    load_byte_codes(octet, v, first, words);
#pragma GCC unroll 2
    for (int step = 0; step < kSteps; ++step) pairs[step] = to_pairs(words[step]);
  }

 private:
  inline I32 to_pairs(__m512i codes) const {
    constexpr int kNumSmall = 8, kExponent = 120 << 7, kNan = 0x7f;
    const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(kExponent));
    const __mmask32 is_small = _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(kNumSmall));
    const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(kNan));
    const __m512i finite = _mm512_mask_permutexvar_epi16(normal, is_small, magnitude, small_);
    const __m512i value = _mm512_mask_mov_epi16(finite, is_nan, _mm512_set1_epi16(0x7fc0));
    return (I32)((U32)value | ((U32)codes & 0x00800080u) << 8);
  }

  __m512i small_;
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

  inline void decode(const uint8_t* octet, int64_t v, I32, int first, I32 (&pairs)[kSteps]) const {
    const __m512i codes = _mm512_loadu_si512(octet + first / kSteps * 256 + v * 64);
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
    pairs[0] = (I32)_mm512_unpacklo_epi8(low, high);
    pairs[1] = (I32)_mm512_unpackhi_epi8(low, high);
  }

 private:
  static constexpr int kRegisters = kSigned ? 2 : 4;
  __m512i low_[kRegisters], high_[kRegisters];
};

#endif

}  // namespace shardline::SHARDLINE_ISA
