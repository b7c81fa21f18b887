// Turns bytes of the cache into pairs of bf16 in registers.
#pragma once

#include "simd/vec.h"

namespace shardline::SHARDLINE_ISA {

#if defined(__AVX512VBMI__)

// The two bytes of the bf16 of each magnitude.
struct MagnitudeBytes {
  alignas(64) uint8_t low[128], high[128];

  constexpr explicit MagnitudeBytes(bool is_e4m3) : low(), high() {
    for (int code = 1; code < 128; ++code) {
      // The value is significand * 2^shift.
      const int exponent = code >> 3, fraction = code & 7;
      const int significand = !is_e4m3 ? code : exponent > 0 ? fraction + 8 : fraction;
      const int shift = !is_e4m3 ? 0 : (exponent > 0 ? exponent : 1) - 10;
      int top = 0;
      while (significand >> (top + 1) > 0) ++top;
      const int bits = (127 + top + shift) << 7 | ((significand << (7 - top)) & 0x7f);
      low[code] = static_cast<uint8_t>(bits);
      high[code] = static_cast<uint8_t>(bits >> 8);
    }
  }
};
inline constexpr MagnitudeBytes kIntegerBytes{false}, kE4m3Bytes{true};

// Looks magnitudes up, and adds the signs.
class BytePairs {
 public:
  explicit BytePairs(bool is_e4m3) : integers_(is_e4m3 ? 0 : ~__mmask64{0}) {
    const MagnitudeBytes& bytes = is_e4m3 ? kE4m3Bytes : kIntegerBytes;
    for (int half = 0; half < 2; ++half) {
      low_[half] = _mm512_load_si512(bytes.low + half * 64);
      high_[half] = _mm512_load_si512(bytes.high + half * 64);
    }
  }

  // 64 bytes as pairs: those of the first 32 bytes, then those of the others.
  void decode(const void* bytes, I32& first, I32& second) const {
    // An unpack takes the lower or upper eight bytes of each 16.
    const __m512i places = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i codes = _mm512_permutexvar_epi64(places, _mm512_loadu_si512(bytes));
    // A magnitude is the lesser of a number and its negative, without signs: vpabsb would compete with products.
    const __m512i magnitudes = _mm512_min_epu8(codes, _mm512_mask_sub_epi8(codes, integers_, __m512i{}, codes));
    const __m512i low = _mm512_permutex2var_epi8(low_[0], magnitudes, low_[1]);
    constexpr int kOrAnd = 0xf8;  // a | (b & c)
    const __m512i high = _mm512_ternarylogic_epi64(_mm512_permutex2var_epi8(high_[0], magnitudes, high_[1]), codes,
                                                   _mm512_set1_epi8(-128), kOrAnd);
    first = (I32)_mm512_unpacklo_epi8(low, high);
    second = (I32)_mm512_unpackhi_epi8(low, high);
  }

 private:
  __mmask64 integers_;  // bytes that are two's complements
  __m512i low_[2], high_[2];
};

#else

struct BytePairs {
  explicit BytePairs(bool) {}
  void decode(const void*, I32&, I32&) const {}
};

#endif

}  // namespace shardline::SHARDLINE_ISA
