#include <cstring>

#include "host_ops.h"
#include "thread_pool.h"

namespace shardline {
namespace {

void scatter_heads(const void* from, void* cache, int64_t slot, int64_t dim, const WriteKvArgs& args) {
  const size_t head_bytes = static_cast<size_t>(dim) * args.element_size;
  const int64_t block = slot / args.block_size, offset = slot % args.block_size;
  for (int64_t head = 0; head < args.num_kv_heads; ++head) {
    const size_t place = static_cast<size_t>((block * args.num_kv_heads + head) * args.block_size + offset);
    std::memcpy(static_cast<char*>(cache) + place * head_bytes,
                static_cast<const char*>(from) + static_cast<size_t>(head) * head_bytes, head_bytes);
  }
}

const void* row_of(const void* base, int64_t row, int64_t stride, size_t element_size) {
  return static_cast<const char*>(base) + static_cast<size_t>(row * stride) * element_size;
}

}  // namespace

void write_kv(const WriteKvArgs& args) {
  constexpr int64_t kSmallTokens = 16;
  parallel_for_if(args.num_tokens > kSmallTokens, args.num_tokens, [&](int64_t token) {
    const int64_t slot = args.slots[token];
    if (slot < 0) return;
    const size_t size = args.element_size;
    scatter_heads(row_of(args.key, token, args.key_stride, size), args.key_cache, slot, args.key_dim, args);
    scatter_heads(row_of(args.value, token, args.value_stride, size), args.value_cache, slot, args.value_dim, args);
  });
}

void write_latent(const WriteLatentArgs& args) {
  const size_t size = args.element_size;
  const size_t latent_bytes = static_cast<size_t>(args.latent_dim) * size;
  const size_t rope_bytes = static_cast<size_t>(args.rope_dim) * size;
  for (int64_t token = 0; token < args.num_tokens; ++token) {
    if (args.slots[token] < 0) continue;
    char* to = static_cast<char*>(args.cache) + static_cast<size_t>(args.slots[token]) * (latent_bytes + rope_bytes);
    std::memcpy(to, row_of(args.latent, token, args.latent_stride, size), latent_bytes);
    std::memcpy(to + latent_bytes, row_of(args.rope_key, token, args.rope_stride, size), rope_bytes);
  }
}

}  // namespace shardline
