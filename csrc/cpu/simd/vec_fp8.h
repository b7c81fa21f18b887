// float8_e4m3fn in the lanes of vec.h.
#pragma once

#include "simd/vec_bytes.h"

namespace shardline::SHARDLINE_ISA {

struct e4m3 {
  int8_t bits;
};

constexpr float kLargestE4m3 = 448.0f;

// It is exact; NaN becomes 480.
inline F32 load(const e4m3* p) {
  const U32 bits = (U32)load_bytes(&p->bits);
  const F32 magnitude = (F32)((bits & 0x7fu) << 20) * 0x1p120f;
  return (F32)((U32)magnitude | (bits & 0x80u) << 24);
}

// Rounds values of at most kLargestE4m3, to even on ties. Lanes hold bytes that store_bytes can store.
inline I32 as_e4m3(F32 v) {
  constexpr float kSmallestNormal = 0x1p-6f, kMagic = 0x1.8p14f;  // the magic number's last bit is 2^-9
  const F32 magnitude = absolute(v);
  const U32 bits = (U32)magnitude;
  const I32 normal = (I32)((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120 << 3);
  const I32 subnormal = (I32)(magnitude + broadcast(kMagic)) - (I32)broadcast(kMagic);
  return (magnitude < kSmallestNormal ? subnormal : normal) | ((I32)v >> 31 & ~0x7f);
}

}  // namespace shardline::SHARDLINE_ISA
