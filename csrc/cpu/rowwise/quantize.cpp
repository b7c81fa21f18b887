#include "dispatch/variant.h"
#include "rowwise/quantize_row.h"
#include "runtime/thread_pool.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int64_t kSmallWork = 1 << 14;

template <class T>
void quantize(const QuantizeRowsArgs& args, int64_t row) {
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
  quantize_row(x, args.depth, row, args.values, args.scales, args.sums);
}

}  // namespace

void quantize_rows(const QuantizeRowsArgs& args) {
  parallel_for_if(args.num_rows * args.depth > kSmallWork, args.num_rows, [&](int64_t row) {
    args.dtype == DType::kFloat32 ? quantize<float>(args, row) : quantize<bf16>(args, row);
  });
}

}  // namespace shardline::SHARDLINE_ISA
