// Arguments of attention, of rotary position embedding, and of the kernels that write the KV cache.
//
// "Rows" are row-major with contiguous elements in a row; a stride counts elements between rows. Blocks of a cache are
// in the order of kv_pages.h, and block_size is a multiple of 16.
#pragma once

#include "runtime/types.h"

namespace shardline {

// The angles by which tokens are rotated, see rotate_head.h.
struct Rotation {
  const void* positions;  // [num_tokens]
  bool positions_are_int64;
  const float* table;  // [max_positions, 2 * half]: cosines, then sines
  int64_t half;
  bool interleaved;
};

struct RopeArgs {
  DType dtype;
  void* x;  // [num_tokens, num_heads, at least 2 * half], in place
  int64_t x_stride, head_stride;
  Rotation rotation;
  int64_t num_tokens, num_heads;
};

// Writes new keys and values into the cache. If there is a rotation, queries and keys are first rotated in place.
struct WriteKvArgs {
  DType dtype;
  Rotation rotation;  // if its table is null, nothing is rotated and there is no query
  void* query;        // [num_tokens, num_heads, key_dim]
  void* key;          // [num_tokens, num_kv_heads, key_dim]
  const void* value;  // [num_tokens, num_kv_heads, value_dim]
  int64_t query_stride, key_stride, value_stride;
  void *key_cache, *value_cache;  // [num_blocks, num_kv_heads, block_size, key_dim or value_dim]
  DType stored;  // in the caches: dtype, or int8 or fp8 (e4m3), which have scales: value = scale * byte
  float *key_scales, *value_scales;  // [num_blocks, num_kv_heads, block_size]; null if there are none
  const int64_t* slots;              // [num_tokens]; negative: not stored
  int64_t num_tokens, num_heads, num_kv_heads, key_dim, value_dim, block_size;
};

// Writes new latents, and the rotated part of their keys, into the cache of latents.
struct WriteLatentArgs {
  DType dtype;
  const void *latent, *rope_key;  // [num_tokens, latent_dim or rope_dim]
  int64_t latent_stride, rope_stride;
  DType stored;  // in the cache, as in WriteKvArgs
  // [num_blocks, block_size, latent_dim + rope_dim]; if it holds bytes, [num_blocks, block_size, latent_dim]
  void* cache;
  bf16* rope_cache;      // [num_blocks, block_size, rope_dim] beside bytes, else null
  float* scales;         // [num_blocks, block_size] of bytes, else null
  const int64_t* slots;  // [num_tokens]; negative: not stored
  int64_t num_tokens, latent_dim, rope_dim;
};

// Results of every row for some splits of the keys: its maximal score and the sum of its weights, [num_splits,
// num_tokens, num_heads], and its weighted sum of values, [num_splits, num_tokens, num_heads, value_dim], not yet
// divided by the sum of weights. A row that sees no key of a split has a sum of zero.
struct AttentionPartials {
  float *maxima, *sums, *outputs;
  int64_t num_splits;
  int64_t first_split, split_step;  // split i of these is split first_split + i * split_step of the keys
};

// Attention over latents (MLA, absorbed) has one KV head and no value cache: a cached row is the key of all heads, and
// its first value_dim elements, the latent, are their value. The query is in two parts.
struct AttentionArgs {
  DType dtype;
  const void* query;  // [num_tokens, num_heads, key_dim]; over latents [num_tokens, num_heads, value_dim]
  int64_t query_stride;
  const void* key_cache;    // [num_blocks, num_kv_heads, block_size, key_dim]
  const void* value_cache;  // [num_blocks, num_kv_heads, block_size, value_dim]; null over latents
  const int32_t* block_tables;
  int64_t block_table_stride;
  const int32_t* query_starts;  // [num_sequences + 1]
  const int32_t* context_lens;  // [num_sequences]
  void* out;                    // [num_tokens, num_heads, value_dim], contiguous
  int64_t num_sequences, num_heads, num_kv_heads, key_dim, value_dim, block_size;
  int64_t window;  // 0 for none
  bool chunked;    // a token sees the keys of its own chunk of `window` positions, not the last `window` keys
  float scale;
  float softcap;       // 0 for none
  const float* sinks;  // [num_heads] scores of a key without a value, which every token sees; null for none
  DType stored;        // in the caches, as in WriteKvArgs
  const float *key_scales, *value_scales;  // [num_blocks, num_kv_heads, block_size]; null if there are none
  const bf16* rope_cache;                  // as in WriteLatentArgs
  const void* query_rope;                  // [num_tokens, num_heads, key_dim - value_dim] over latents, else null
  int64_t query_rope_stride, query_rope_head_stride;
  AttentionPartials partials;  // computed in place of `out`, if its pointers are set
};

// Merges partials of several ranks, which follow one another. Split i of the keys is split i / num_ranks of rank
// i % num_ranks.
struct MergePartialsArgs {
  DType dtype;
  const float *maxima, *sums, *outputs;  // as in AttentionPartials, [num_ranks, ...]
  const float* sinks;                    // as in AttentionArgs
  void* out;                             // [num_tokens, num_heads, value_dim], contiguous
  int64_t num_ranks, num_splits, num_tokens, num_heads, value_dim;
};

}  // namespace shardline
