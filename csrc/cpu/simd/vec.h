// One vector of floats of the ISA that this file is compiled for, and the few operations that need intrinsics.
//
// Kernel sources are compiled several times, once per ISA, inside `namespace shardline::SHARDLINE_ISA`. They use no
// inline function of the standard library: the linker would keep only one copy of it, perhaps one compiled for AVX-512.
#pragma once

#include "runtime/types.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace shardline::SHARDLINE_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// The hint by which __builtin_prefetch fetches into L2. A core has twice as many lines on their way to L2 as to L1.
constexpr int kToL2 = 2;

#if defined(__AVX512BF16__)
constexpr bool kHasBf16Dot = true;
#else
constexpr bool kHasBf16Dot = false;
#endif

typedef float F32 __attribute__((vector_size(kLanes * 4)));
typedef int32_t I32 __attribute__((vector_size(kLanes * 4)));
typedef uint32_t U32 __attribute__((vector_size(kLanes * 4)));
typedef uint16_t U16 __attribute__((vector_size(kLanes * 2)));

// Lane numbers 0..kLanes-1, to be expanded into a shuffle.
template <int... kLane>
struct Lanes {};
#if defined(__AVX512F__)
using AllLanes = Lanes<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>;
#elif defined(__AVX2__)
using AllLanes = Lanes<0, 1, 2, 3, 4, 5, 6, 7>;
#else
using AllLanes = Lanes<0, 1, 2, 3>;
#endif

template <int... kLane>
inline I32 lane_numbers(Lanes<kLane...>) {
  return I32{kLane...};
}

inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline F32 broadcast(float x) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(x);
#elif defined(__AVX2__)
  return _mm256_set1_ps(x);
#else
  return F32{x, x, x, x};
#endif
}

inline I32 broadcast_int(int32_t x) {
#if defined(__AVX512F__)
  return (I32)_mm512_set1_epi32(x);
#elif defined(__AVX2__)
  return (I32)_mm256_set1_epi32(x);
#else
  return I32{x, x, x, x};
#endif
}

// a * b + c, fused where the ISA can fuse. Elsewhere it is always rounded twice.
inline F32 fma(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__FP_FAST_FMAF)
  F32 sum;
  for (int i = 0; i < kLanes; ++i) sum[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return sum;
#else
  return a * b + c;
#endif
}

// The larger of a and b; b if one of them is NaN.
inline F32 maximum(F32 a, F32 b) {
#if defined(__AVX512F__)
  return _mm512_maskz_max_ps(0xffff, a, b);  // gcc 12 warns about the unmasked one
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
inline F32 minimum(F32 a, F32 b) {
#if defined(__AVX512F__)
  return _mm512_maskz_min_ps(0xffff, a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}
inline F32 absolute(F32 a) { return (F32)((U32)a & 0x7fffffffu); }

// bf16 bits as floats. gcc 12 splits __builtin_convertvector into pieces, so the conversion is written out here and
// below.
inline F32 shifted_up(U16 v) {
#if defined(__AVX512F__)
  return (F32)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)v), 16);
#elif defined(__AVX2__)
  return (F32)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)v), 16);
#elif defined(__SSE2__)
  return (F32)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_set_epi64x(0, (int64_t)v));
#else
  return (F32)(__builtin_convertvector(v, U32) << 16);
#endif
}

// Drops the upper halves, which are zero, of values below 2^16.
inline U16 low_halves(U32 v) {
#if defined(__AVX512F__)
  return (U16)_mm512_cvtepi32_epi16((__m512i)v);
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)v, (__m256i)v);
  return (U16)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x88));
#else
  return __builtin_convertvector(v, U16);
#endif
}

inline float to_float(bf16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
inline float to_float(float x) { return x; }

inline F32 load(const float* p) {
  F32 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline F32 load(const bf16* p) {
  U16 v;
  __builtin_memcpy(&v, p, sizeof v);
  return shifted_up(v);
}

inline F32 load(const int8_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(p)));
#else
  F32 v;
  for (int i = 0; i < kLanes; ++i) v[i] = static_cast<float>(p[i]);
  return v;
#endif
}

// IEEE half precision. It is exact; NaN becomes infinite.
inline F32 load_half(const uint16_t* p) {
  U16 v;
  __builtin_memcpy(&v, p, sizeof v);
#if defined(__AVX512F__)
  return _mm512_cvtph_ps((__m256i)v);
#else
  const U32 bits = (U32)shifted_up(v) >> 16, magnitude = bits & 0x7fffu;
  const U32 finite = (U32)((F32)(magnitude << 13) * 0x1p112f);
  return (F32)((magnitude < 0x7c00u ? finite : U32{} + 0x7f800000u) | (bits & 0x8000u) << 16);
#endif
}

inline void store(float* p, F32 v) { __builtin_memcpy(p, &v, sizeof v); }

#if defined(__AVX512BF16__)
// The instructions that round to bf16 take subnormal numbers for zeros. Everything else they round correctly.
constexpr int kSubnormal = 0x20;
inline bool has_subnormal(F32 v) { return __builtin_expect(_mm512_fpclass_ps_mask(v, kSubnormal) != 0, 0); }
inline bool has_subnormal(F32 a, F32 b) {
  const bool none = _kortestz_mask16_u8(_mm512_fpclass_ps_mask(a, kSubnormal), _mm512_fpclass_ps_mask(b, kSubnormal));
  return __builtin_expect(!none, 0);
}
#endif

// Rounds to bf16, to even on ties; NaN stays NaN.
inline U16 rounded_halves(F32 v) {
#if defined(__AVX512BF16__)
  if (!has_subnormal(v)) return (U16)(__m256i)_mm512_cvtneps_pbh(v);
#endif
  const U32 bits = (U32)v;
  const U32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U32 quiet_nan = (bits >> 16) | 0x40u;
  return low_halves(v == v ? rounded : quiet_nan);
}
inline void store(bf16* p, F32 v) {
  const U16 halves = rounded_halves(v);
  __builtin_memcpy(p, &halves, sizeof halves);
}

// Stores 2 * kLanes neighbours.
template <class T>
inline void store_two(T* p, F32 first, F32 second) {
#if defined(__AVX512BF16__)
  if constexpr (sizeof(T) == sizeof(bf16)) {
    if (!has_subnormal(first, second)) {
      const __m512bh halves = _mm512_cvtne2ps_pbh(second, first);
      __builtin_memcpy(p, &halves, sizeof halves);
      return;
    }
  }
#endif
  store(p, first);
  store(p + kLanes, second);
}

// The first n lanes; the other lanes are read as zero and not written. So the end of a row is computed as a whole
// vector.
template <class T>
inline F32 load_n(const T* p, int64_t n) {
  if (n >= kLanes) return load(p);
  alignas(64) T padded[kLanes] = {};
  __builtin_memcpy(padded, p, static_cast<size_t>(n) * sizeof(T));
  return load(padded);
}
template <class T>
inline void store_n(T* p, F32 v, int64_t n) {
  if (n >= kLanes) return store(p, v);
  alignas(64) T padded[kLanes];
  store(padded, v);
  __builtin_memcpy(p, padded, static_cast<size_t>(n) * sizeof(T));
}

// The value that remains when a value is stored as type T.
template <class T>
inline F32 rounded_to(F32 v) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return v;
  } else {
    return shifted_up(rounded_halves(v));
  }
}

// The same for two.
template <class T>
inline void round_two_to(F32& first, F32& second) {
#if defined(__AVX512BF16__)
  if constexpr (sizeof(T) == sizeof(bf16)) {
    if (!has_subnormal(first, second)) {
      // Word i goes to the upper half of lane i: one shuffle instead of a conversion and a shift.
      const __m512i places = _mm512_setr_epi32(0x0000, 0x10000, 0x20000, 0x30000, 0x40000, 0x50000, 0x60000, 0x70000,
                                               0x80000, 0x90000, 0xa0000, 0xb0000, 0xc0000, 0xd0000, 0xe0000, 0xf0000);
      const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(second, first);
      constexpr __mmask32 kUpper = 0xaaaaaaaa;
      first = (F32)_mm512_maskz_permutexvar_epi16(kUpper, places, halves);
      second = (F32)_mm512_maskz_permutexvar_epi16(kUpper, places + (__m512i)(U32{} + 0x100000u), halves);
      return;
    }
  }
#endif
  first = rounded_to<T>(first);
  second = rounded_to<T>(second);
}

template <int kStep, int... kLane>
inline F32 rotated(F32 v, Lanes<kLane...>) {
  return __builtin_shufflevector(v, v, ((kLane + kStep) % kLanes)...);
}

// Adds lane i to lane i + half, then halves again. This is the only order in which lanes are ever added.
inline float sum_lanes(F32 v) {
  if constexpr (kLanes > 8) v = v + rotated<8>(v, AllLanes{});
  if constexpr (kLanes > 4) v = v + rotated<4>(v, AllLanes{});
  v = v + rotated<2>(v, AllLanes{});
  return (v + rotated<1>(v, AllLanes{}))[0];
}
inline float max_lanes(F32 v) {
  if constexpr (kLanes > 8) v = maximum(v, rotated<8>(v, AllLanes{}));
  if constexpr (kLanes > 4) v = maximum(v, rotated<4>(v, AllLanes{}));
  v = maximum(v, rotated<2>(v, AllLanes{}));
  return maximum(v, rotated<1>(v, AllLanes{}))[0];
}

// kLanes pairs of bf16, the even element of each pair in the low half.
inline I32 load_pairs(const bf16* p) {
  I32 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline F32 even_of(I32 pairs) { return (F32)((U32)pairs << 16); }
inline F32 odd_of(I32 pairs) { return (F32)((U32)pairs & 0xffff0000u); }

// 2 * kLanes floats rounded to bf16, to even on ties, in order.
inline I32 rounded_pairs(F32 first, F32 second) {
#if defined(__AVX512BF16__)
  return (I32)(__m512i)_mm512_cvtne2ps_pbh(second, first);
#else
  bf16 halves[2 * kLanes];
  store(halves, first);
  store(halves + kLanes, second);
  return load_pairs(halves);
#endif
}

// sum + a.even * b.even + a.odd * b.odd
inline F32 dot_pairs(F32 sum, I32 a, I32 b) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(sum, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
#else
  sum = fma(even_of(a), even_of(b), sum);
  return fma(odd_of(a), odd_of(b), sum);
#endif
}

}  // namespace shardline::SHARDLINE_ISA
