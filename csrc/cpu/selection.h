// The strongest logits of a row, in the one order used everywhere: larger logit first, then lower id.
#pragma once

#include <cstdint>
#include <vector>

namespace shardline {

struct Candidate {
  float logit;
  int32_t id;
};

inline bool stronger(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// The `count` strongest of the row (all, if it has fewer), sorted; NaN is left out.
void strongest(const float* logits, int64_t vocab_size, int64_t count, std::vector<Candidate>& out);

}  // namespace shardline
