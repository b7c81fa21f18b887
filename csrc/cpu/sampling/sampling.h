// Functions of rows of logits: penalties, sampling, log-probabilities.
#pragma once

#include "runtime/types.h"

namespace shardline {

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

// Row r has the entries [offsets[r], offsets[r + 1]). A token id appears at most once in a row.
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
