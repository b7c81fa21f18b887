// The keys that an indexer chooses for a query: the score of a key is the sum over heads of weight * max(0, query .
// key).
#pragma once

#include "runtime/types.h"

namespace shardline {

struct ScoreKeysArgs {
  DType dtype;
  const void* query;  // [num_rows, num_heads, dim]
  int64_t query_stride, head_stride;
  const float* weights;  // [num_rows, num_heads]
  int64_t weights_stride;
  const void* keys;  // [num_blocks, block_size, dim], in the order of tokens
  const int32_t* block_tables;
  int64_t table_stride;
  const int32_t* sequences;  // [num_rows]: the row of the block table
  const int32_t* contexts;   // [num_rows]: keys that the row sees
  float* scores;             // [num_rows, scores_stride]
  int64_t scores_stride;
  int64_t num_rows, num_heads, dim, block_size;
  int64_t most_keys;  // the largest context
};

struct ChooseKeysArgs {
  ScoreKeysArgs rows;
  int64_t* slots;  // [num_rows, top_k]: of the keys with the highest scores, in the order of their positions
  int64_t top_k;
};

// Copies tokens to pages of 16 tokens each, one after another, in the order of kv_pages.h.
struct TakeTokensArgs {
  const void* pages;
  const int64_t* slots;  // [num_slots], a multiple of 16
  void* out;
  int64_t num_slots, num_words;  // words of a token
  int64_t word_bytes;            // 1, 2 or 4
};

void take_tokens(const TakeTokensArgs& args);

// Of two keys with the same score, the earlier one is chosen; a NaN product counts as zero, and a NaN score is the
// lowest.
void choose_keys(const ChooseKeysArgs& args);

}  // namespace shardline
