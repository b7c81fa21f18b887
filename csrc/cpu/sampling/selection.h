// The strongest logits of a row, in the one order used everywhere: larger logit first, then lower id.
//
// Nothing here sorts a whole row: logits are counted into coarse buckets by magnitude, and only the bucket in which the
// answer lies (or those above it, if they are wanted) is sorted.
#pragma once

#include <cstdint>
#include <vector>

namespace shardline {

struct Candidate {
  float logit;
  int32_t id;
};

// The `count` strongest of the row (all, if it has fewer), sorted; NaN is left out.
void strongest(const float* logits, int64_t vocab_size, int64_t count, std::vector<Candidate>& out);

// The k-th largest logit, 1 <= k <= vocab_size.
float kth_largest(const float* logits, int64_t vocab_size, int64_t k);

// The weakest token of the shortest prefix, strongest first, whose weights sum to `target`; id -1 if all of them do
// not. Sums are fp64: bucket by bucket, in id order within one, and in the order of strength where the prefix ends.
Candidate prefix_end(const float* logits, const float* weights, int64_t vocab_size, double target);

}  // namespace shardline
