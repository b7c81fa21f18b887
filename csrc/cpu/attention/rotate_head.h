// Rotary position embedding of one head, in place. It rotates the pairs (i, i + half), or (2i, 2i + 1) if interleaved,
// of the first 2 * half elements; the rest stays as it is. It is computed in fp32 and rounded once.
#pragma once

#include "dispatch/kernels.h"
#include "simd/vec.h"

namespace shardline::SHARDLINE_ISA {

// The cosines of a token's angles, then the sines.
inline const float* angles_of(const Rotation& rotation, int64_t token) {
  const int64_t position = rotation.positions_are_int64 ? static_cast<const int64_t*>(rotation.positions)[token]
                                                        : static_cast<const int32_t*>(rotation.positions)[token];
  return rotation.table + position * 2 * rotation.half;
}

template <class T>
inline void rotate(T* first, T* second, const float* cosines, const float* sines, int64_t n) {
  const F32 a = load_n(first, n), b = load_n(second, n);
  const F32 c = load_n(cosines, n), s = load_n(sines, n);
  store_n(first, fma(a, c, -(b * s)), n);
  store_n(second, fma(b, c, a * s), n);
}

template <class T>
inline void rotate_head(T* head, const float* angles, const Rotation& rotation) {
  const int64_t half = rotation.half;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = min64(kLanes, half - i);
    if (!rotation.interleaved) {
      rotate(head + i, head + half + i, angles + i, angles + half + i, n);
      continue;
    }
    T even[kLanes], odd[kLanes];
    for (int64_t k = 0; k < n; ++k) {
      even[k] = head[2 * (i + k)];
      odd[k] = head[2 * (i + k) + 1];
    }
    rotate(even, odd, angles + i, angles + half + i, n);
    for (int64_t k = 0; k < n; ++k) {
      head[2 * (i + k)] = even[k];
      head[2 * (i + k) + 1] = odd[k];
    }
  }
}

}  // namespace shardline::SHARDLINE_ISA
