// Sums a token's slots in their order, in fp32, adds the shared block, and rounds once.
#include "dispatch/variant.h"
#include "runtime/thread_pool.h"
#include "simd/vec.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int64_t kTaskElements = 1 << 13;

template <class Rows, class Shared, class Out>
void combine_token(const CombineArgs& args, int64_t token) {
  const int32_t* places = args.places + token * args.num_slots;
  const float* weights = args.weights + token * args.num_slots;
  const Shared* shared = static_cast<const Shared*>(args.shared);
  const F32 shared_scale = broadcast(args.shared_scale == nullptr ? 1.0f : args.shared_scale[token]);
  Out* out = static_cast<Out*>(args.out) + token * args.out_stride;
  for (int64_t c = 0; c < args.width; c += kLanes) {
    const int64_t n = args.width - c;
    F32 sum = {};
    for (int64_t slot = 0; slot < args.num_slots; ++slot) {
      if (places[slot] < 0) continue;
      const Rows* row = static_cast<const Rows*>(args.rows) + places[slot] * args.width;
      sum = fma(broadcast(weights[slot]), load_n(row + c, n), sum);
    }
    if (shared != nullptr) sum = fma(shared_scale, load_n(shared + token * args.shared_stride + c, n), sum);
    store_n(out + c, sum, n);
  }
}

template <class Rows>
void combine_rows_of(const CombineArgs& args, int64_t token) {
  if (args.out_dtype == DType::kFloat32) {
    args.shared_dtype == DType::kFloat32 ? combine_token<Rows, float, float>(args, token)
                                         : combine_token<Rows, bf16, float>(args, token);
  } else {
    args.shared_dtype == DType::kFloat32 ? combine_token<Rows, float, bf16>(args, token)
                                         : combine_token<Rows, bf16, bf16>(args, token);
  }
}

}  // namespace

void combine(const CombineArgs& args) {
  const bool parallel = args.num_tokens * args.num_slots * args.width > kTaskElements;
  parallel_for_if(parallel, args.num_tokens, [&](int64_t token) {
    args.rows_dtype == DType::kFloat32 ? combine_rows_of<float>(args, token) : combine_rows_of<bf16>(args, token);
  });
}

}  // namespace shardline::SHARDLINE_ISA
