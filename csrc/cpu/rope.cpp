// Rotary position embedding in place: pairs (i, i + half), or (2i, 2i + 1) if interleaved, of the first 2 * half
// elements of each head; the rest of the head is left alone. In fp32, rounded once.
#include "thread_pool.h"
#include "variant.h"
#include "vec.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int64_t kSmallWork = 1 << 14;

template <class T>
inline void rotate(T* first, T* second, const float* cosines, const float* sines, int64_t n) {
  const F32 a = load_n(first, n), b = load_n(second, n);
  const F32 c = load_n(cosines, n), s = load_n(sines, n);
  store_n(first, fma(a, c, -(b * s)), n);
  store_n(second, fma(b, c, a * s), n);
}

template <class T>
void rotate_head(T* head, const float* table_row, int64_t half, bool interleaved) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = min64(kLanes, half - i);
    if (!interleaved) {
      rotate(head + i, head + half + i, table_row + i, table_row + half + i, n);
      continue;
    }
    T even[kLanes], odd[kLanes];
    for (int64_t k = 0; k < n; ++k) {
      even[k] = head[2 * (i + k)];
      odd[k] = head[2 * (i + k) + 1];
    }
    rotate(even, odd, table_row + i, table_row + half + i, n);
    for (int64_t k = 0; k < n; ++k) {
      head[2 * (i + k)] = even[k];
      head[2 * (i + k) + 1] = odd[k];
    }
  }
}

template <class T>
void rope_tokens(const RopeArgs& args) {
  const bool parallel = args.num_tokens * args.num_heads * args.half > kSmallWork;
  parallel_for_if(parallel, args.num_tokens, [&](int64_t token) {
    const int64_t position = args.positions_are_int64 ? static_cast<const int64_t*>(args.positions)[token]
                                                      : static_cast<const int32_t*>(args.positions)[token];
    const float* table_row = args.table + position * 2 * args.half;
    T* heads = static_cast<T*>(args.x) + token * args.x_stride;
    for (int64_t h = 0; h < args.num_heads; ++h) {
      rotate_head(heads + h * args.head_stride, table_row, args.half, args.interleaved);
    }
  });
}

}  // namespace

void rope(const RopeArgs& args) {
  args.dtype == DType::kFloat32 ? rope_tokens<float>(args) : rope_tokens<bf16>(args);
}

}  // namespace shardline::SHARDLINE_ISA
