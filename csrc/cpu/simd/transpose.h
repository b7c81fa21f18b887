// Square blocks of 32-bit words, held in as many vectors as a vector has lanes.
#pragma once

#include "simd/vec.h"

namespace shardline::SHARDLINE_ISA {

template <int kBlock, int... kLane>
inline void exchange(I32& a, I32& b, Lanes<kLane...>) {
  const I32 low = __builtin_shufflevector(a, b, (kLane / kBlock % 2 ? kLanes + kLane - kBlock : kLane)...);
  b = __builtin_shufflevector(a, b, (kLane / kBlock % 2 ? kLanes + kLane : kLane + kBlock)...);
  a = low;
}

// Lane i of vector j becomes lane j of vector i.
template <int kBlock = 1>
inline void transpose(I32 (&m)[kLanes]) {
  if constexpr (kBlock < kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i / kBlock % 2 == 0) exchange<kBlock>(m[i], m[i + kBlock], AllLanes{});
    }
    transpose<2 * kBlock>(m);
  }
}

}  // namespace shardline::SHARDLINE_ISA
