// Rows of activations as signed bytes with one scale each. A row's bytes depend on the row only.
#include "thread_pool.h"
#include "variant.h"
#include "vec_bytes.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int64_t kSmallWork = 1 << 14;

template <class T>
void quantize_row(const QuantizeRowsArgs& args, int64_t row) {
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
  const int64_t num_groups = ceil_div(args.depth, kGroupDepth);
  int8_t* values = args.values + row * num_groups * kGroupDepth;
  int32_t* sums = args.sums + row * (num_groups + 1);
  const ByteScale scale = byte_scale(largest_magnitude(x, args.depth));
  args.scales[row] = scale.scale;
  if (scale.inverse == 0.0f) {  // of nothing but zeros, or not finite
    __builtin_memset(values, 0, static_cast<size_t>(num_groups * kGroupDepth));
    __builtin_memset(sums, 0, static_cast<size_t>(num_groups + 1) * sizeof *sums);
    return;
  }
  const F32 inverse = broadcast(scale.inverse);
  int32_t total = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t begin = g * kGroupDepth;
    const bool whole = begin + kGroupDepth <= args.depth;
    I32 sum = {};
    for (int64_t k = begin; k < begin + kGroupDepth; k += kLanes) {
      const F32 value = whole ? load(x + k) : load_n(x + k, max64(0, args.depth - k));
      const I32 bytes = nearest(value * inverse);
      store_bytes(values + k, bytes);
      sum += bytes;
    }
    sums[1 + g] = sum_lanes(sum);
    total += sums[1 + g];
  }
  sums[0] = total;
}

}  // namespace

void quantize_rows(const QuantizeRowsArgs& args) {
  parallel_for_if(args.num_rows * args.depth > kSmallWork, args.num_rows, [&](int64_t row) {
    args.dtype == DType::kFloat32 ? quantize_row<float>(args, row) : quantize_row<bf16>(args, row);
  });
}

}  // namespace shardline::SHARDLINE_ISA
