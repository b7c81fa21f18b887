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
  const F32 inverse = broadcast(scale.inverse);
  int32_t total = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    I32 sum = {};
    for (int64_t k = g * kGroupDepth; k < (g + 1) * kGroupDepth; k += kLanes) {
      const I32 bytes = k < args.depth ? quantized(load_n(x + k, args.depth - k), inverse) : I32{};
      store_bytes(values + k, bytes);
      sum += bytes;
    }
    sums[1 + g] = sum_lanes(sum);
    total += sums[1 + g];
  }
  sums[0] = total;
  args.scales[row] = scale.scale;
}

}  // namespace

void quantize_rows(const QuantizeRowsArgs& args) {
  parallel_for_if(args.num_rows * args.depth > kSmallWork, args.num_rows, [&](int64_t row) {
    args.dtype == DType::kFloat32 ? quantize_row<float>(args, row) : quantize_row<bf16>(args, row);
  });
}

}  // namespace shardline::SHARDLINE_ISA
