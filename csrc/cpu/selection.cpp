#include "selection.h"

#include <algorithm>
#include <cstring>

namespace shardline {
namespace {

// Monotonic: a larger logit has a larger key. NaN has key 0.
uint32_t order_key(float logit) {
  if (logit != logit) return 0;
  logit += 0.0f;  // -0 and 0 are equal
  uint32_t bits;
  std::memcpy(&bits, &logit, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The largest threshold, a multiple of 2^20 in key space, that at least `count` logits reach; one pass over the row.
uint32_t threshold_key(const float* logits, int64_t vocab_size, int64_t count) {
  constexpr int kShift = 20;
  std::vector<uint32_t> histogram(size_t{1} << (32 - kShift));
  for (int64_t id = 0; id < vocab_size; ++id) ++histogram[order_key(logits[id]) >> kShift];
  int64_t reached = 0;
  for (size_t bucket = histogram.size() - 1; bucket > 0; --bucket) {
    reached += histogram[bucket];
    if (reached >= count) return static_cast<uint32_t>(bucket) << kShift;
  }
  return 1;
}

}  // namespace

void strongest(const float* logits, int64_t vocab_size, int64_t count, std::vector<Candidate>& out) {
  const uint32_t threshold = count < vocab_size ? threshold_key(logits, vocab_size, count) : 1;
  out.clear();
  for (int64_t id = 0; id < vocab_size; ++id) {
    if (order_key(logits[id]) >= threshold) out.push_back({logits[id], static_cast<int32_t>(id)});
  }
  const int64_t kept = std::min<int64_t>(count, static_cast<int64_t>(out.size()));
  std::partial_sort(out.begin(), out.begin() + kept, out.end(), stronger);
  out.resize(static_cast<size_t>(kept));
}

}  // namespace shardline
