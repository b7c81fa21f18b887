// Writes latents into the paged cache of multi-head latent attention. It only moves memory, so it exists once for all
// ISAs.
#pragma once

#include "runtime/types.h"

namespace shardline {

struct WriteLatentArgs {
  size_t element_size;
  const void *latent, *rope_key;  // [num_tokens, latent_dim or rope_dim]
  int64_t latent_stride, rope_stride;
  void* cache;           // [num_blocks * block_size, latent_dim + rope_dim]
  const int64_t* slots;  // [num_tokens]; negative: not stored
  int64_t num_tokens, latent_dim, rope_dim;
};
void write_latent(const WriteLatentArgs& args);

}  // namespace shardline
