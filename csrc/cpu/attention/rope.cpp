#include "attention/rotate_head.h"
#include "dispatch/variant.h"
#include "runtime/thread_pool.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int64_t kSmallWork = 1 << 14;

template <class T>
void rope_tokens(const RopeArgs& args) {
  const bool parallel = args.num_tokens * args.num_heads * args.rotation.half > kSmallWork;
  parallel_for_if(parallel, args.num_tokens, [&](int64_t token) {
    const float* angles = angles_of(args.rotation, token);
    T* heads = static_cast<T*>(args.x) + token * args.x_stride;
    for (int64_t h = 0; h < args.num_heads; ++h) rotate_head(heads + h * args.head_stride, angles, args.rotation);
  });
}

}  // namespace

void rope(const RopeArgs& args) { args.dtype == DType::kFloat32 ? rope_tokens<float>(args) : rope_tokens<bf16>(args); }

}  // namespace shardline::SHARDLINE_ISA
