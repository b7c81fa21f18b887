// Transcendental functions, lane by lane. Every lane evaluates the same polynomial, so a value never depends on its
// place.
#pragma once

#include "simd/vec.h"

namespace shardline::SHARDLINE_ISA {

inline F32 polynomial(F32, F32 sum) { return sum; }
template <class... Rest>
inline F32 polynomial(F32 x, F32 sum, float coefficient, Rest... rest) {
  return polynomial(x, fma(sum, x, broadcast(coefficient)), rest...);
}

// Relative error below 2e-7; zero below -86.9, infinity above 88.7.
inline F32 exp(F32 x) {
  const F32 clamped = x > 89.0f ? broadcast(89.0f) : x;
  // Adding 1.5 * 2^23 leaves the integer nearest to x / ln 2 in the low bits.
  const F32 magic = broadcast(12582912.0f);
  const F32 shifted = fma(clamped, broadcast(1.44269504f), magic);
  const F32 n = shifted - magic;
  F32 r = fma(n, broadcast(-0.693145751953125f), clamped);
  r = fma(n, broadcast(-1.42860677e-6f), r);
  const F32 tail =
      polynomial(r, broadcast(1.381459837e-3f), 8.368716898e-3f, 4.166838805e-2f, 1.666652063e-1f, 4.999999345e-1f);
  const F32 mantissa = fma(r * r, tail, r) + 1.0f;
  // 2^(n-1), then doubled: 2^128 has no exponent field.
  const I32 exponent = (I32)shifted - (I32)magic + 126;
  const F32 y = mantissa * (F32)(exponent << 23) * 2.0f;
  return x < -86.9f ? F32{} : y;
}

#if defined(__AVX512F__)
// 2^x for x <= 0 (rounding may leave x a little above 0), for results that will be rounded to bf16. The relative error
// is below 1.1e-4, a twentieth of what that rounding may add. It is exact at 0, and 0 for minus infinity.
inline F32 exp2_coarse(F32 x) {
  const F32 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const F32 mantissa = polynomial(x - n, broadcast(5.500877e-2f), 0.24221098f, 0.69328295f, 1.0f);
  return _mm512_scalef_ps(mantissa, n);  // 0 for n = -infinity, whatever the mantissa
}
#endif

// x * 2^n for whole n from -126 to 128.
inline F32 times_power_of_2(F32 x, F32 n) {
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(0xffff, x, n);
#else
  const F32 magic = broadcast(12582912.0f);
  const I32 exponent = (I32)(n + magic) - (I32)magic + 126;
  return x * (F32)(exponent << 23) * 2.0f;
#endif
}

// Absolute and relative error below 3e-7.
inline F32 tanh(F32 x) {
  const F32 a = absolute(x);
  const F32 square = x * x;
  const F32 series = polynomial(square, broadcast(-5.717044511e-3f), 2.065058678e-2f, -5.374349792e-2f, 1.333149128e-1f,
                                -3.333328393e-1f);
  const F32 small = fma(square * x, series, x);
  const F32 large = 1.0f - 2.0f / (exp(a + a) + 1.0f);
  const F32 signed_large = (F32)((U32)large | ((U32)x & 0x80000000u));
  return a < 0.625f ? small : signed_large;
}

#if defined(__AVX512F__)
// x = 1 / (1 + 2^(-x log2(e))), with a relative error below 3e-7. From 128 up it is 1; where it is 0, 2^n is infinite.
// All vectors take each step together: one vector after another, their latencies would add up.
template <int kCount>
inline void sigmoid(F32 (&x)[kCount]) {
  F32 n[kCount], r[kCount], power[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) x[i] = minimum(broadcast(128.0f), x[i]);
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
    n[i] = _mm512_maskz_roundscale_ps(0xffff, x[i] * -1.442695f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) r[i] = fma(x[i], broadcast(-1.442695f), -n[i]);
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) r[i] = fma(x[i], broadcast(-1.925963e-8f), r[i]);
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) power[i] = fma(r[i], broadcast(1.326472731e-3f), broadcast(9.671512991e-3f));
  constexpr float kRest[] = {5.550733581e-2f, 2.402224243e-1f, 6.931470037e-1f, 1.0f};
#pragma GCC unroll 4
  for (const float coefficient : kRest) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) power[i] = fma(power[i], r[i], broadcast(coefficient));
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) x[i] = 1.0f / (1.0f + (F32)_mm512_maskz_scalef_ps(0xffff, power[i], n[i]));
}
#else
// x = 1 / (1 + exp(-x)). The steps are those of exp on negated numbers, with the same bits, since each step is odd or
// even. From 87 up, adding exp(-x) to 1 changes nothing. All vectors take each step together: one vector after another,
// their latencies would add up.
template <int kCount>
inline void sigmoid(F32 (&x)[kCount]) {
  const F32 magic = broadcast(12582912.0f);
  F32 r[kCount], n[kCount], tail[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) r[i] = minimum(broadcast(87.0f), maximum(broadcast(-89.0f), x[i]));
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) n[i] = fma(r[i], broadcast(-1.44269504f), magic) - magic;
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) r[i] = fma(n[i], broadcast(0.693145751953125f), r[i]);
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) r[i] = fma(n[i], broadcast(1.42860677e-6f), r[i]);
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) tail[i] = fma(r[i], broadcast(-1.381459837e-3f), broadcast(8.368716898e-3f));
  constexpr float kRest[] = {-4.166838805e-2f, 1.666652063e-1f, -4.999999345e-1f};
#pragma GCC unroll 3
  for (const float coefficient : kRest) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) tail[i] = fma(tail[i], r[i], broadcast(coefficient));
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) x[i] = times_power_of_2(1.0f - fma(r[i] * r[i], tail[i], r[i]), n[i]);
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) x[i] = 1.0f / (1.0f + x[i]);
}
#endif

// The distribution function of the standard normal. erfc(z) = exp(-z^2) P(t), with t = 1 / (1 + 0.4 z), keeps the left
// tail exact, where 1 + erf would cancel.
inline F32 normal_cdf(F32 x) {
  const F32 z = absolute(x) * 0.707106781f;
  const F32 t = 1.0f / fma(z, broadcast(0.4f), broadcast(1.0f));
  const F32 p = polynomial(t, broadcast(4.125304093e-2f), -1.403192429e-1f, 8.398729890e-2f, 8.796432877e-2f,
                           7.975649620e-2f, 1.933932072e-1f, 2.018875901e-1f, 2.264431114e-1f, 2.256342312e-1f);
  const F32 tail = exp(-z * z) * (p * t) * 0.5f;
  return x > 0.0f ? 1.0f - tail : tail;
}

}  // namespace shardline::SHARDLINE_ISA
