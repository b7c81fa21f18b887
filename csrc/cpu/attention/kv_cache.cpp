// Writes new keys and values into the paged cache, as they are or as signed bytes with one scale per token and head.
// The bytes of a head depend on that head only. Queries and keys are rotated on the way, while they are in the cache.
#include "attention/rotate_head.h"
#include "dispatch/variant.h"
#include "runtime/thread_pool.h"
#include "simd/vec_bytes.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int64_t kSmallWork = 1 << 14;

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
void rotate_heads(T* heads, int64_t num_heads, int64_t dim, const float* angles, const Rotation& rotation) {
  for (int64_t h = 0; h < num_heads; ++h) rotate_head(heads + h * dim, angles, rotation);
}

// `place` is the token's place in its block's first head.
template <class T>
void store_heads(const T* heads, int64_t dim, int64_t place, void* cache, float* scales, const WriteKvArgs& args) {
  for (int64_t head = 0; head < args.num_kv_heads; ++head, heads += dim, place += args.block_size) {
    if (scales != nullptr) {
      quantize_head(heads, dim, static_cast<int8_t*>(cache) + place * dim, scales + place);
    } else {
      __builtin_memcpy(static_cast<T*>(cache) + place * dim, heads, static_cast<size_t>(dim) * sizeof(T));
    }
  }
}

template <class T>
void write_token(const WriteKvArgs& args, int64_t token) {
  T* key = static_cast<T*>(args.key) + token * args.key_stride;
  if (args.rotation.table != nullptr) {
    const float* angles = angles_of(args.rotation, token);
    T* query = static_cast<T*>(args.query) + token * args.query_stride;
    rotate_heads(query, args.num_heads, args.key_dim, angles, args.rotation);
    rotate_heads(key, args.num_kv_heads, args.key_dim, angles, args.rotation);
  }
  const int64_t slot = args.slots[token];
  if (slot < 0) return;
  const int64_t place = slot / args.block_size * args.num_kv_heads * args.block_size + slot % args.block_size;
  const T* value = static_cast<const T*>(args.value) + token * args.value_stride;
  store_heads(key, args.key_dim, place, args.key_cache, args.key_scales, args);
  store_heads(value, args.value_dim, place, args.value_cache, args.value_scales, args);
}

}  // namespace

void write_kv(const WriteKvArgs& args) {
  const int64_t width = (args.num_heads + args.num_kv_heads) * args.key_dim + args.num_kv_heads * args.value_dim;
  parallel_for_if(args.num_tokens * width > kSmallWork, args.num_tokens, [&](int64_t token) {
    args.dtype == DType::kFloat32 ? write_token<float>(args, token) : write_token<bf16>(args, token);
  });
}

}  // namespace shardline::SHARDLINE_ISA
