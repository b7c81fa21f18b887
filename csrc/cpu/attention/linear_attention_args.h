// The gated delta rule (Yang et al., arXiv 2412.06464) or Mamba-2 (Dao and Gu, arXiv 2405.21060) behind a short causal
// convolution, and the gated norm of its output. A token's output depends on the tokens before it through a state of
// fixed size.
#pragma once

#include "runtime/types.h"

namespace shardline {

constexpr int64_t kMostTaps = 16;

struct LinearAttentionArgs {
  DType dtype;
  const void* qkv;  // [num_tokens, channels]: queries and keys of all key heads, values of all value heads
  int64_t qkv_stride;
  const void* gate;  // [num_tokens, num_value_heads * value_dim]
  int64_t gate_stride;
  const void* beta;  // [num_tokens, num_value_heads]; delta rule only
  int64_t beta_stride;
  const void* decay;  // [num_tokens, num_value_heads]
  int64_t decay_stride;
  const float* conv;          // [channels, num_taps]; the last tap is that of the token itself
  const float* conv_bias;     // [channels] or null
  const float* decay_log;     // [num_value_heads]
  const float* decay_offset;  // [num_value_heads]
  const float* skip;          // [num_value_heads]: factor of a value that is added to its output; null: delta rule
  const void* norm;           // [value_dim], or for Mamba-2 [num_value_heads * value_dim]
  float* state;               // [num_rows, num_value_heads, key_dim, value_dim]
  void* recent;               // [num_rows, num_taps - 1, channels]: what the convolution sees of the tokens before
  const int32_t* query_starts;
  const int32_t* context_lens;
  const int32_t* rows;  // [num_sequences]: of the state
  void* out;            // [num_tokens, num_value_heads * value_dim]
  int64_t num_sequences, num_key_heads, num_value_heads, key_dim, value_dim, num_taps;
  float eps;
};

}  // namespace shardline
