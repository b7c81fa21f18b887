// Mixes the parts of a row, so that a few large numbers become many small ones. If x and the weight are both mixed,
// their product stays what it is. (QuaRot, arXiv 2404.00456, and its predecessors.)
#pragma once

#include "dispatch/kernels.h"
#include "simd/vec.h"

namespace shardline::SHARDLINE_ISA {

// Multiplies kParts neighbouring parts of `width` numbers by a Hadamard matrix, times `factor`: sums and differences
// of pairs of parts whose numbers differ in one bit, in fp32, the lowest bit first.
template <int kParts, class T>
void mix_parts(const T* x, int64_t width, float factor, float* out) {
  for (int64_t next = 0; next < width; next += kLanes) {
    // The last vector overlaps the one before if it can, since a vector that is cut short is slow.
    const int64_t k = width < kLanes ? 0 : min64(next, width - kLanes), n = width - k;
    F32 part[kParts];
#pragma GCC unroll 32
    for (int i = 0; i < kParts; ++i) part[i] = load_n(x + i * width + k, n);
#pragma GCC unroll 5
    for (int bit = 1; bit < kParts; bit *= 2) {
#pragma GCC unroll 32
      for (int i = 0; i < kParts; ++i) {
        if ((i & bit) != 0) continue;
        const F32 low = part[i], high = part[i | bit];
        part[i] = low + high;
        part[i | bit] = low - high;
      }
    }
#pragma GCC unroll 32
    for (int i = 0; i < kParts; ++i) store_n(out + i * width + k, part[i] * factor, n);
  }
}

// x [depth] with its parts mixed: 32 of them, or as many as a power of two divides. With `inverse`, it is divided by
// their number.
template <class T>
void rotate_row(const T* x, int64_t depth, bool inverse, float* out) {
  if (depth % 32 == 0) return mix_parts<32>(x, depth / 32, inverse ? 1.0f / 32 : 1.0f, out);
  if (depth % 16 == 0) return mix_parts<16>(x, depth / 16, inverse ? 1.0f / 16 : 1.0f, out);
  if (depth % 8 == 0) return mix_parts<8>(x, depth / 8, inverse ? 1.0f / 8 : 1.0f, out);
  if (depth % 4 == 0) return mix_parts<4>(x, depth / 4, inverse ? 1.0f / 4 : 1.0f, out);
  if (depth % 2 == 0) return mix_parts<2>(x, depth / 2, inverse ? 1.0f / 2 : 1.0f, out);
  mix_parts<1>(x, depth, 1.0f, out);
}

}  // namespace shardline::SHARDLINE_ISA
