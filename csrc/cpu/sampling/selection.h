// The strongest logits of a row. One order is used everywhere: larger logit first, then lower id.
//
// Nothing here sorts a whole row. Logits are counted in coarse buckets by magnitude, and only the bucket with the
// answer (or those above it, if they are wanted) is sorted.
#pragma once

#include <cstdint>
#include <vector>

namespace shardline {

struct Candidate {
  float logit;
  int32_t id;
};

// The `count` strongest logits of the row, sorted; all of them if the row has fewer. NaN is left out.
void strongest(const float* logits, int64_t vocab_size, int64_t count, std::vector<Candidate>& out);

// The k-th largest logit, 1 <= k <= vocab_size.
float kth_largest(const float* logits, int64_t vocab_size, int64_t k);

// The weakest token of the shortest prefix, strongest first, whose weights sum to `target`; id -1 if the whole row sums
// to less. Sums are fp64: bucket by bucket, in the order of ids within a bucket, and in the order of strength in the
// last one.
Candidate prefix_end(const float* logits, const float* weights, int64_t vocab_size, double target);

}  // namespace shardline
