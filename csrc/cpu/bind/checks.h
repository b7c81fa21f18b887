// Checks of the indices in a step's tensors: a wrong index would read or write foreign memory. The checks are part of a
// recorded call, since a replay has other values in the same places.
#pragma once

#include <cstdint>

#include "attention/attention_args.h"
#include "bind/tensor.h"

namespace shardline {

inline void check_slots(const int64_t* slots, int64_t num_tokens, int64_t num_slots) {
  for (int64_t token = 0; token < num_tokens; ++token) {
    if (slots[token] >= num_slots) raise_value_error("a slot lies outside the KV cache");
  }
}

inline void check_sequences(const AttentionArgs& args, int64_t num_tokens, int64_t max_blocks, int64_t num_blocks) {
  if (args.query_starts[0] != 0 || args.query_starts[args.num_sequences] != num_tokens) {
    raise_value_error("query_starts must run from 0 to the number of tokens");
  }
  for (int64_t s = 0; s < args.num_sequences; ++s) {
    const int64_t query_len = args.query_starts[s + 1] - args.query_starts[s];
    const int64_t context_len = args.context_lens[s];
    if (query_len < 0 || context_len < query_len || context_len > max_blocks * args.block_size) {
      raise_value_error("sequence " + std::to_string(s) + ": context length " + std::to_string(context_len) +
                        " does not fit " + std::to_string(query_len) + " query tokens and the block table");
    }
    if (query_len == 0) continue;
    const int64_t first = args.window > 0 ? context_len - query_len - args.window + 1 : 0;
    for (int64_t b = first > 0 ? first / args.block_size : 0; b * args.block_size < context_len; ++b) {
      const int32_t block = args.block_tables[s * args.block_table_stride + b];
      if (block < 0 || block >= num_blocks) raise_value_error("a block table names a block outside the KV cache");
    }
  }
}

}  // namespace shardline
