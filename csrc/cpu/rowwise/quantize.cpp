#include "dispatch/variant.h"
#include "rowwise/quantize_row.h"
#include "rowwise/rotate_row.h"
#include "runtime/thread_pool.h"
#include "simd/vec_fp8.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int64_t kSmallWork = 1 << 14;

template <class T>
void quantize(const QuantizeRowsArgs& args, int64_t row) {
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
  if (!args.rotated) return quantize_row(x, args.depth, row, args.values, args.scales, args.sums);
  float* mixed = static_cast<float*>(thread_scratch(static_cast<size_t>(args.depth) * sizeof(float)));
  rotate_row(x, args.depth, false, mixed);
  quantize_row(mixed, args.depth, row, args.values, args.scales, args.sums);
}

// The nearest values of float8_e4m3fn; larger ones become the largest.
inline F32 rounded_to_e4m3(F32 v) {
  const F32 largest = broadcast(kLargestE4m3);
  const F32 cut = v > largest ? largest : v < -largest ? -largest : v;
  const F32 magnitude = (F32)((U32)(as_e4m3(cut) & 0x7f) << 20) * 0x1p120f;
  return (F32)((U32)magnitude | ((U32)v & 0x80000000u));
}

template <class T>
void round_row(const RoundRowsArgs& args, int64_t row) {
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
  T* out = static_cast<T*>(args.out) + row * args.depth;
  const int64_t num_groups = ceil_div(args.depth, args.group_size);
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t begin = g * args.group_size, end = min64(begin + args.group_size, args.depth);
    float magnitude = largest_magnitude(x + begin, end - begin);
    const bool is_finite = magnitude - magnitude == 0.0f;
    if (args.bound > 0.0f && magnitude > args.bound && is_finite) magnitude = args.bound;
    ByteScale scale = byte_scale(magnitude, kLargestE4m3);
    if (args.fixed_scale > 0.0f && is_finite) scale = {args.fixed_scale, 1.0f / args.fixed_scale};
    if (!(scale.inverse - scale.inverse == 0.0f)) scale = {0.0f, 0.0f};
    args.scales[row * num_groups + g] = scale.scale;
    if (scale.inverse == 0.0f) {  // all zeros, or not finite
      __builtin_memset(out + begin, 0, static_cast<size_t>(end - begin) * sizeof(T));
      continue;
    }
    const F32 inverse = broadcast(scale.inverse);
    for (int64_t k = begin; k < end; k += kLanes) {
      store_n(out + k, rounded_to_e4m3(load_n(x + k, end - k) * inverse), end - k);
    }
  }
}

}  // namespace

void round_rows_e4m3(const RoundRowsArgs& args) {
  parallel_for_if(args.num_rows * args.depth > kSmallWork, args.num_rows, [&](int64_t row) {
    args.dtype == DType::kFloat32 ? round_row<float>(args, row) : round_row<bf16>(args, row);
  });
}

void quantize_rows(const QuantizeRowsArgs& args) {
  parallel_for_if(args.num_rows * args.depth > kSmallWork, args.num_rows, [&](int64_t row) {
    args.dtype == DType::kFloat32 ? quantize<float>(args, row) : quantize<bf16>(args, row);
  });
}

}  // namespace shardline::SHARDLINE_ISA
