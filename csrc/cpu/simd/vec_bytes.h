// Integers in the lanes of vec.h: products of bytes, four at a time, and conversions between floats and bytes.
#pragma once

#include "simd/vec.h"

namespace shardline::SHARDLINE_ISA {

#if defined(__AVX512VNNI__)
constexpr bool kHasByteDot = true;
#else
constexpr bool kHasByteDot = false;
#endif

typedef int16_t HalfLanes __attribute__((vector_size(kLanes * 4)));
typedef uint16_t UHalfLanes __attribute__((vector_size(kLanes * 4)));
typedef uint8_t ByteLanes __attribute__((vector_size(kLanes * 4)));

inline I32 load_quads(const void* p) {
  I32 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

inline I32 load(const int32_t* p) { return load_quads(p); }
inline void store(int32_t* p, I32 v) { __builtin_memcpy(p, &v, sizeof v); }

inline I32 broadcast_quad(const int8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, sizeof quad);
  return broadcast_int(quad);
}

inline F32 to_float(I32 v) { return __builtin_convertvector(v, F32); }

#if !defined(__AVX512VNNI__) && defined(__SSE2__)
// Products of 16-bit lanes; the two products of each pair are added.
inline I32 multiply_pairs(HalfLanes a, HalfLanes b) {
#if defined(__AVX512BW__)
  return (I32)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (I32)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return (I32)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
}
#endif

// sum + the four products of the unsigned bytes of `w` and the signed bytes of `x`. It is exact: no ISA saturates here.
inline I32 dot_quads(I32 sum, I32 w, I32 x) {
#if defined(__AVX512VNNI__)
  return (I32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__SSE2__)
  const HalfLanes w_even = (HalfLanes)((U32)w & 0x00ff00ffu), w_odd = (HalfLanes)((UHalfLanes)w >> 8);
  const HalfLanes x_even = (HalfLanes)((UHalfLanes)x << 8) >> 8, x_odd = (HalfLanes)x >> 8;
  return sum + multiply_pairs(w_even, x_even) + multiply_pairs(w_odd, x_odd);
#else
  for (int byte = 0; byte < 4; ++byte) {
    sum += (I32)((U32)w >> (8 * byte) & 0xffu) * ((I32)((U32)x << (24 - 8 * byte)) >> 24);
  }
  return sum;
#endif
}

// Sums of 32 products per lane, as dot_quads, for unsigned bytes of at most 15. A sum takes eight calls of
// add_small_quads between begin_small and end_small. Without the dot instruction the intermediate sums fit 16 bits:
// 8 x 2 x 15 x 127 < 2^15.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
inline I32 begin_small(I32) { return I32{}; }
inline I32 add_small_quads(I32 sum, I32 w, I32 x) {
#if defined(__AVX512BW__)
  return (I32)((HalfLanes)sum + (HalfLanes)_mm512_maddubs_epi16((__m512i)w, (__m512i)x));
#else
  return (I32)((HalfLanes)sum + (HalfLanes)_mm256_maddubs_epi16((__m256i)w, (__m256i)x));
#endif
}
inline I32 end_small(I32 sum, I32 start) {
  return start + multiply_pairs((HalfLanes)sum, (HalfLanes)broadcast_int(0x00010001));
}
#else
inline I32 begin_small(I32 start) { return start; }
inline I32 add_small_quads(I32 sum, I32 w, I32 x) { return dot_quads(sum, w, x); }
inline I32 end_small(I32 sum, I32) { return sum; }
#endif

// Loads kLanes bytes, one into each lane.
inline I32 load_bytes(const int8_t* p) {
#if defined(__AVX512F__)
  return (I32)_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (I32)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  I32 v;
  for (int i = 0; i < kLanes; ++i) v[i] = p[i];
  return v;
#endif
}

// total + value * scale, for values within 16 bits and scales within 8.
inline I32 add_scaled(I32 total, I32 value, I32 scale) {
#if defined(__AVX512VNNI__)
  return (I32)_mm512_dpwssd_epi32((__m512i)total, (__m512i)value, (__m512i)(scale & 0xffff));
#elif defined(__SSE2__)
  return total + multiply_pairs((HalfLanes)value, (HalfLanes)(scale & 0xffff));
#else
  return total + value * scale;
#endif
}

// The nearest integers, to even on ties; |v| must be below 2^22.
inline I32 nearest(F32 v) {
#if defined(__AVX512F__)
  return (I32)_mm512_maskz_cvtps_epi32(0xffff, v);  // gcc 12 warns about the unmasked one
#elif defined(__AVX2__)
  return (I32)_mm256_cvtps_epi32(v);
#else
  const F32 magic = broadcast(12582912.0f);  // 1.5 * 2^23
  return (I32)(v + magic) - (I32)magic;
#endif
}

// Stores lanes within [-128, 127] as bytes.
inline void store_bytes(int8_t* p, I32 v) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)v);
  __builtin_memcpy(p, &bytes, kLanes);
#elif defined(__AVX2__)
  const __m256i halves = _mm256_packs_epi32((__m256i)v, (__m256i)v);
  const __m256i quads = _mm256_packs_epi16(halves, halves);
  const int32_t parts[2] = {_mm256_extract_epi32(quads, 0), _mm256_extract_epi32(quads, 4)};
  __builtin_memcpy(p, parts, kLanes);
#elif defined(__SSE2__)
  const __m128i halves = _mm_packs_epi32((__m128i)v, (__m128i)v);
  const int32_t bytes = _mm_cvtsi128_si32(_mm_packs_epi16(halves, halves));
  __builtin_memcpy(p, &bytes, kLanes);
#else
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(v[i]);
#endif
}

inline int32_t sum_lanes(I32 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
#endif
}

// The bits of a row's largest magnitude. Bits without the sign order as magnitudes do. Four chains hide the latency.
template <class Bits, class Element>
inline Element largest_bits(const void* row, int64_t width, Element sign_off) {
  constexpr int64_t kCount = sizeof(Bits) / sizeof(Element);
  constexpr int kChains = 4;
  Bits best[kChains] = {};
  const char* bytes = static_cast<const char*>(row);
  int64_t i = 0;
  for (; i + kChains * kCount <= width; i += kChains * kCount) {
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) {
      Bits bits;
      __builtin_memcpy(&bits, bytes + (i + c * kCount) * int64_t{sizeof(Element)}, sizeof bits);
      bits &= sign_off;
      best[c] = bits > best[c] ? bits : best[c];
    }
  }
  for (int c = 1; c < kChains; ++c) best[0] = best[c] > best[0] ? best[c] : best[0];
  Element largest = 0;
  for (int64_t lane = 0; lane < kCount; ++lane) largest = best[0][lane] > largest ? best[0][lane] : largest;
  for (; i < width; ++i) {
    Element bits;
    __builtin_memcpy(&bits, bytes + i * int64_t{sizeof(Element)}, sizeof bits);
    bits = static_cast<Element>(bits & sign_off);
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// The largest magnitude of a row. It is NaN if the row holds a NaN, since a NaN's bits are above those of infinity.
inline float largest_magnitude(const float* row, int64_t width) {
  const int32_t bits = largest_bits<I32, int32_t>(row, width, 0x7fffffff);
  float magnitude;
  __builtin_memcpy(&magnitude, &bits, sizeof magnitude);
  return magnitude;
}
inline float largest_magnitude(const bf16* row, int64_t width) {
  return to_float(bf16{static_cast<uint16_t>(largest_bits<HalfLanes, int16_t>(row, width, 0x7fff))});
}

// How a row becomes bytes: value = scale * byte. The largest magnitude becomes `largest`. A row that is not finite gets
// a scale of NaN, so that everything computed from it is NaN too. A row so small that its reciprocal overflows counts
// as zero.
constexpr float kLargestInt8 = 127.0f;
struct ByteScale {
  float scale, inverse;
};
inline ByteScale byte_scale(float magnitude, float largest = kLargestInt8) {
  if (magnitude < 1e-36f) return {0.0f, 0.0f};
  const float scale = magnitude / largest;
  if (!(scale - scale == 0.0f)) return {__builtin_nanf(""), 0.0f};
  return {scale, largest / magnitude};
}

// Values before they are rounded; all are 0 if the inverse is, whatever they were.
inline F32 scaled(F32 values, F32 inverse) { return inverse == 0.0f ? F32{} : values * inverse; }

// Values as bytes.
inline I32 quantized(F32 values, F32 inverse) { return nearest(scaled(values, inverse)); }

}  // namespace shardline::SHARDLINE_ISA
