// Writes new latents into the paged cache of multi-head latent attention.
#include <cstring>

#include "attention/latent_cache.h"

namespace shardline {
namespace {

const void* row_of(const void* base, int64_t row, int64_t stride, size_t element_size) {
  return static_cast<const char*>(base) + static_cast<size_t>(row * stride) * element_size;
}

}  // namespace

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
