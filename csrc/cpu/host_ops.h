// Ops that need no vector ISA of their own: memory moves and selection.
#pragma once

#include "types.h"

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

// Rows of a packed weight as they were. A step of a panel is 4 bytes a column: a pair of bf16, or a float.
struct PackedRowsArgs {
  const void* panels;  // [num_panels][num_steps][64][4 bytes]
  const int64_t* indices;
  void* out;  // [num_rows][row_bytes]
  int64_t num_rows, num_steps, row_bytes;
};
void packed_rows(const PackedRowsArgs& args);

// A linear for every head: x[:, h] times weight h.
struct HeadLinearArgs {
  DType dtype;
  const void* x;  // [num_tokens, num_heads, depth]
  int64_t x_stride, x_head_stride;
  const void* panels;  // [num_heads] weights as in PackArgs
  void* out;           // [num_tokens, num_heads, num_columns]
  int64_t out_stride, out_head_stride;
  int64_t num_tokens, num_heads, num_columns, depth;
};
void linear_heads(const HeadLinearArgs& args);

// How each row of logits is sampled.
struct SamplingRow {
  float temperature;  // 0: greedy
  int32_t top_k;      // <= 0: off
  float top_p;        // 1: off
  float min_p;        // 0: off
  uint64_t seed;
  uint32_t choice;
  uint64_t position;
};
struct SampleArgs {
  const float* logits;  // [num_rows, vocab_size]
  int64_t logits_stride, num_rows, vocab_size;
  const float *temperature, *top_p, *min_p;
  const int32_t* top_k;
  const int64_t *seeds, *choices, *positions;
  uint32_t purpose;
  int64_t* tokens;
};
void sample(const SampleArgs& args);

// Entries of row r are [offsets[r], offsets[r + 1]); a token id appears at most once in a row.
struct PenaltyArgs {
  float* logits;  // [num_rows, vocab_size], in place
  int64_t logits_stride, num_rows, vocab_size;
  const int32_t *offsets, *ids, *output_counts;
  const uint8_t* in_prompt;
  const float* bias;
  const float *repetition, *presence, *frequency;  // [num_rows]
};
void penalize(const PenaltyArgs& args);

struct LogprobArgs {
  const float* logits;  // [num_rows, vocab_size]
  int64_t logits_stride, num_rows, vocab_size;
  const int64_t* chosen;
  int64_t top_n;
  float* chosen_logprobs;
  int64_t* chosen_ranks;
  int64_t* top_ids;     // [num_rows, top_n]
  float* top_logprobs;  // [num_rows, top_n]
};
void logprobs(const LogprobArgs& args);

}  // namespace shardline
