// Turns a row of activations into signed bytes with one scale. The bytes depend on that row only.
#pragma once

#include "dispatch/kernels.h"
#include "simd/vec_bytes.h"

namespace shardline::SHARDLINE_ISA {

// x [depth] becomes row number `row` of values, scales and sums as in QuantizeRowsArgs.
template <class T>
void quantize_row(const T* x, int64_t depth, int64_t row, int8_t* values, float* scales, int32_t* sums) {
  const int64_t num_groups = ceil_div(depth, kGroupDepth);
  values += row * num_groups * kGroupDepth;
  sums += row * (num_groups + 1);
  const ByteScale scale = byte_scale(largest_magnitude(x, depth));
  scales[row] = scale.scale;
  if (scale.inverse == 0.0f) {  // all zeros, or not finite
    __builtin_memset(values, 0, static_cast<size_t>(num_groups * kGroupDepth));
    __builtin_memset(sums, 0, static_cast<size_t>(num_groups + 1) * sizeof *sums);
    return;
  }
  const F32 inverse = broadcast(scale.inverse);
  int32_t total = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t begin = g * kGroupDepth;
    const bool whole = begin + kGroupDepth <= depth;
    I32 sum = {};
    for (int64_t k = begin; k < begin + kGroupDepth; k += kLanes) {
      const F32 value = whole ? load(x + k) : load_n(x + k, max64(0, depth - k));
      const I32 bytes = nearest(value * inverse);
      store_bytes(values + k, bytes);
      sum += bytes;
    }
    sums[1 + g] = sum_lanes(sum);
    total += sums[1 + g];
  }
  sums[0] = total;
}

}  // namespace shardline::SHARDLINE_ISA
