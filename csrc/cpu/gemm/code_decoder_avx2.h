// The decoders of code_decoder.h for 8 columns at a time.
#pragma once

#include "gemm/code_tables.h"
#include "simd/vec_bytes.h"

namespace shardline::SHARDLINE_ISA {

#if defined(__AVX2__) && !defined(__AVX512BW__)

// An octet has four steps, one for each pair of k. All of them are decoded at once.
constexpr int kSteps = 4;

inline __m256i in_both_lanes(const uint8_t* bytes) {
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
}

// 4-bit codes. The offset of a column is zero_entry(4) - zero; it is ignored without kZeros.
template <bool kZeros, int kParts>
class NibbleDecoder {
 public:
  static constexpr int64_t kBits = 4;
  static constexpr int kNumParts = kParts;
  static constexpr bool kHasZeros = kZeros;

  // What `decode` takes for the zero points of 8 columns: their offsets in all bytes of a lane.
  static inline I32 offsets(I32 zeros) { return (broadcast_int(zero_entry(kBits)) - zeros) * 0x01010101; }

  explicit NibbleDecoder(const CodeTables& tables) {
    for (int part = 0; part < kParts; ++part) {
      alignas(16) uint8_t low[kNibbleEntries], high[kNibbleEntries];
      for (int i = 0; i < kNibbleEntries; ++i) {
        low[i] = static_cast<uint8_t>(tables.parts[part][i]);
        high[i] = static_cast<uint8_t>(tables.parts[part][i] >> 8);
      }
      for (int half = 0; half < kHalves; ++half) {
        low_[part][half] = in_both_lanes(low + half * 16);
        high_[part][half] = in_both_lanes(high + half * 16);
      }
    }
  }

  // Pairs of the four steps of an octet, each with its parts, for columns [8 v, 8 v + 8).
  inline void decode(const uint8_t* octet, int64_t v, I32 offset, int, I32 (&pairs)[kSteps * kParts]) const {
    U32 codes;
    __builtin_memcpy(&codes, octet + v * 32, sizeof codes);
    U32 even = codes & 0x0f0f0f0fu, odd = codes >> 4 & 0x0f0f0f0fu;
    if constexpr (kZeros) {
      even += (U32)offset;
      odd += (U32)offset;
    }
    look_up((__m256i)even, 0, pairs);
    look_up((__m256i)odd, 1, pairs);
  }

 private:
  static constexpr int kHalves = kZeros ? 2 : 1;

  // The entries of a table that the bytes of `index` name. A shuffle reads the lowest four bits.
  static inline __m256i entries(const __m256i (&table)[kHalves], __m256i index) {
    const __m256i first = _mm256_shuffle_epi8(table[0], index);
    if constexpr (kZeros) {
      return _mm256_blendv_epi8(first, _mm256_shuffle_epi8(table[1], index), _mm256_slli_epi16(index, 3));
    }
    return first;
  }

  // Bytes 0 and 2 of a column belong to the pair of `step`, and bytes 1 and 3 to that of step + 2.
  inline void look_up(__m256i index, int step, I32 (&pairs)[kSteps * kParts]) const {
    const __m256i even_bytes = _mm256_set1_epi16(0xff);
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      const __m256i low = entries(low_[part], index), high = entries(high_[part], index);
      pairs[step * kParts + part] = (I32)_mm256_or_si256(_mm256_and_si256(low, even_bytes), _mm256_slli_epi16(high, 8));
      pairs[(step + 2) * kParts + part] =
          (I32)_mm256_or_si256(_mm256_srli_epi16(low, 8), _mm256_andnot_si256(even_bytes, high));
    }
  }

  __m256i low_[kParts][kHalves], high_[kParts][kHalves];
};

// The four pairs of 8-bit codes of columns [8 v, 8 v + 8), each in 16 bits.
inline void load_byte_codes(const uint8_t* octet, int64_t v, __m256i (&words)[4]) {
  const __m256i zero = _mm256_setzero_si256();
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(octet + half * 256 + v * 32));
    words[half * 2] = _mm256_unpacklo_epi8(codes, zero);
    words[half * 2 + 1] = _mm256_unpackhi_epi8(codes, zero);
  }
}

// 6- or 8-bit codes that stand for integers: code - zero, or without kZeros code + the first value of the table. No
// table is needed, since an integer of 8 bits and a sign is exact in the upper half of a float.
template <int64_t kCodeBits, bool kZeros>
class IntegerDecoder {
 public:
  static constexpr int64_t kBits = kCodeBits;
  static constexpr int kNumParts = 1;
  static constexpr bool kHasZeros = kZeros;

  // The negative zero points in both halves of a lane.
  static inline I32 offsets(I32 zeros) { return -zeros << 16 | (-zeros & 0xffff); }

  explicit IntegerDecoder(const CodeTables& tables)
      : first_(_mm256_set1_epi16(static_cast<int16_t>(tables.values[0]))) {}

  inline void decode(const uint8_t* octet, int64_t v, I32 offset, int, I32 (&pairs)[kSteps]) const {
    __m256i words[4];
    if constexpr (kBits == 8) {
      load_byte_codes(octet, v, words);
    } else {
      load_six_bit_codes(octet, v, words);
    }
    const __m256i add = kZeros ? (__m256i)offset : first_;
#pragma GCC unroll 4
    for (int step = 0; step < 4; ++step) pairs[step] = to_pairs(_mm256_add_epi16(words[step], add));
  }

 private:
  inline void load_six_bit_codes(const uint8_t* octet, int64_t v, __m256i (&words)[4]) const {
    const uint8_t* half = octet + v / 4 * 192 + v % 2 * 32;
    const int odd = v / 2 % 2;
    const __m256i own = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(half + odd * 64));
    const __m256i shared = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(half + 128));
    if (odd == 0) {
      const __m256i seam = _mm256_blend_epi16(shared, own, 0x88);
      pick(0, {own, own, seam, shared}, words);
    } else {
      const __m256i seam = _mm256_blend_epi16(shared, own, 0x11);
      pick(1, {shared, seam, own, own}, words);
    }
  }

  struct Sources {
    __m256i of_step[4];
  };

  [[gnu::always_inline]] inline void pick(int odd, const Sources& sources, __m256i (&words)[4]) const {
    const __m256i left = _mm256_set1_epi64x(0x0100004000100400);  // to the upper end of 16 bits
#pragma GCC unroll 4
    for (int step = 0; step < 4; ++step) {
      const __m256i places = _mm256_load_si256(reinterpret_cast<const __m256i*>(kPlaces.of_step[odd][step]));
      const __m256i bytes = _mm256_shuffle_epi8(sources.of_step[step], places);
      words[step] = _mm256_srli_epi16(_mm256_mullo_epi16(bytes, left), 10);
    }
  }

  static inline I32 to_pairs(__m256i integers) {
    const F32 even = to_float((I32)integers << 16 >> 16), odd = to_float((I32)integers >> 16);
    return (I32)((U32)even >> 16 | ((U32)odd & 0xffff0000u));
  }

  static constexpr SixBitPlaces<32> kPlaces = six_bit_byte_places<32>();
  __m256i first_;
};

using IntegerSixBitDecoder = IntegerDecoder<6, false>;
template <bool kZeros>
using IntegerByteDecoder = IntegerDecoder<8, kZeros>;

// Bytes in float8_e4m3fn. The codes of normal numbers become bf16 by a shift and an addition to the exponent; the eight
// smallest magnitudes are looked up.
class E4m3Decoder {
 public:
  static constexpr int64_t kBits = 8;
  static constexpr int kNumParts = 1;
  static constexpr bool kHasZeros = false;

  explicit E4m3Decoder(const CodeTables& tables) {
    alignas(16) uint8_t low[16], high[16];
    for (int i = 0; i < 16; ++i) {
      low[i] = static_cast<uint8_t>(tables.parts[0][i]);
      high[i] = static_cast<uint8_t>(tables.parts[0][i] >> 8);
    }
    low_ = in_both_lanes(low);
    high_ = in_both_lanes(high);
  }

  inline void decode(const uint8_t* octet, int64_t v, I32, int, I32 (&pairs)[kSteps]) const {
    __m256i words[4];
    load_byte_codes(octet, v, words);
#pragma GCC unroll 4
    for (int step = 0; step < 4; ++step) pairs[step] = to_pairs(words[step]);
  }

 private:
  inline I32 to_pairs(__m256i codes) const {
    constexpr int kNumSmall = 8, kExponent = 120 << 7, kNan = 0x7f;
    const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi16(0x7f));
    const __m256i normal = _mm256_add_epi16(_mm256_slli_epi16(magnitude, 4), _mm256_set1_epi16(kExponent));
    const __m256i small = _mm256_or_si256(_mm256_shuffle_epi8(low_, magnitude),
                                          _mm256_slli_epi16(_mm256_shuffle_epi8(high_, magnitude), 8));
    const __m256i is_small = _mm256_cmpgt_epi16(_mm256_set1_epi16(kNumSmall), magnitude);
    const __m256i is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(kNan));
    const U32 sign = ((U32)codes & 0x00800080u) << 8;
    return (I32)((U32)_mm256_blendv_epi8(normal, small, is_small) | ((U32)is_nan & 0x7fc07fc0u) | sign);
  }

  __m256i low_, high_;
};

#endif

}  // namespace shardline::SHARDLINE_ISA
