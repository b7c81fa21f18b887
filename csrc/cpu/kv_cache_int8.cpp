// New keys or values as signed bytes with one scale per token and head. A row's bytes depend on the row only.
#include "thread_pool.h"
#include "variant.h"
#include "vec_bytes.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int64_t kSmallTokens = 16;

template <class T>
void quantize_head(const T* x, int64_t dim, int8_t* values, float* scale) {
  const ByteScale chosen = byte_scale(largest_magnitude(x, dim));
  const F32 inverse = broadcast(chosen.inverse);
  for (int64_t d = 0; d < dim; d += kLanes) {
    int8_t bytes[kLanes];
    store_bytes(bytes, quantized(load_n(x + d, dim - d), inverse));
    __builtin_memcpy(values + d, bytes, static_cast<size_t>(min64(kLanes, dim - d)));
  }
  *scale = chosen.scale;
}

template <class T>
void quantize_token(const QuantizeKvArgs& args, int64_t token) {
  const int64_t slot = args.slots[token];
  if (slot < 0) return;
  const T* x = static_cast<const T*>(args.x) + token * args.x_stride;
  const int64_t block = slot / args.block_size, offset = slot % args.block_size;
  for (int64_t head = 0; head < args.num_kv_heads; ++head) {
    const int64_t place = (block * args.num_kv_heads + head) * args.block_size + offset;
    quantize_head(x + head * args.dim, args.dim, args.cache + place * args.dim, args.scales + place);
  }
}

}  // namespace

void quantize_kv(const QuantizeKvArgs& args) {
  parallel_for_if(args.num_tokens > kSmallTokens, args.num_tokens, [&](int64_t token) {
    args.dtype == DType::kFloat32 ? quantize_token<float>(args, token) : quantize_token<bf16>(args, token);
  });
}

}  // namespace shardline::SHARDLINE_ISA
