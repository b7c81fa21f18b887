#include "sampling/selection.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace shardline {
namespace {

constexpr int kShift = 20;  // a bucket: sign, exponent and three bits of mantissa
constexpr size_t kNumBuckets = size_t{1} << (32 - kShift);

bool stronger(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// The bucket rises with the logit. Bucket 0 holds NaN and nothing else.
uint32_t bucket_of(float logit) {
  if (logit != logit) return 0;
  logit += 0.0f;  // -0 and 0 are equal
  uint32_t bits;
  std::memcpy(&bits, &logit, sizeof bits);
  const uint32_t negative = 0u - (bits >> 31);  // all ones or none; a branch would be mispredicted
  return (bits ^ (negative | 0x80000000u)) >> kShift;
}

// The highest bucket that, together with all buckets above it, holds `count` logits (bucket 1 if there are fewer), and
// the number of logits above it.
struct Boundary {
  uint32_t bucket;
  int64_t num_above;
};

Boundary find_boundary(const float* logits, int64_t vocab_size, int64_t count) {
  std::vector<uint32_t> counts(kNumBuckets);
  for (int64_t id = 0; id < vocab_size; ++id) ++counts[bucket_of(logits[id])];
  int64_t above = 0;
  for (uint32_t bucket = kNumBuckets - 1; bucket > 1; --bucket) {
    if (above + counts[bucket] >= count) return {bucket, above};
    above += counts[bucket];
  }
  return {1, above};
}

template <class Wanted>
void collect(const float* logits, int64_t vocab_size, std::vector<Candidate>& out, const Wanted& wanted) {
  out.clear();
  for (int64_t id = 0; id < vocab_size; ++id) {
    if (wanted(bucket_of(logits[id]))) out.push_back({logits[id], static_cast<int32_t>(id)});
  }
}

thread_local std::vector<Candidate> bucket_memory;

}  // namespace

void strongest(const float* logits, int64_t vocab_size, int64_t count, std::vector<Candidate>& out) {
  const Boundary boundary = find_boundary(logits, vocab_size, count);
  collect(logits, vocab_size, out, [&](uint32_t bucket) { return bucket >= boundary.bucket; });
  const int64_t kept = std::min<int64_t>(count, static_cast<int64_t>(out.size()));
  std::partial_sort(out.begin(), out.begin() + kept, out.end(), stronger);
  out.resize(static_cast<size_t>(kept));
}

float kth_largest(const float* logits, int64_t vocab_size, int64_t k) {
  const Boundary boundary = find_boundary(logits, vocab_size, k);
  std::vector<Candidate>& bucket = bucket_memory;
  collect(logits, vocab_size, bucket, [&](uint32_t b) { return b == boundary.bucket; });
  const size_t place = static_cast<size_t>(k - 1 - boundary.num_above);
  if (place >= bucket.size()) return -INFINITY;  // NaN leaves fewer logits
  std::nth_element(bucket.begin(), bucket.begin() + static_cast<std::ptrdiff_t>(place), bucket.end(), stronger);
  return bucket[place].logit;
}

Candidate prefix_end(const float* logits, const float* weights, int64_t vocab_size, double target) {
  std::vector<double> masses(kNumBuckets);
  for (int64_t id = 0; id < vocab_size; ++id) masses[bucket_of(logits[id])] += weights[id];
  double before = 0.0;
  uint32_t end = kNumBuckets - 1;
  while (end > 0 && (masses[end] == 0.0 || before + masses[end] < target)) before += masses[end--];
  if (end == 0) return {-INFINITY, -1};
  std::vector<Candidate>& bucket = bucket_memory;
  collect(logits, vocab_size, bucket, [&](uint32_t b) { return b == end; });
  std::sort(bucket.begin(), bucket.end(), stronger);
  Candidate last = bucket.front();
  for (const Candidate& candidate : bucket) {
    if (weights[candidate.id] == 0.0f) continue;  // dropped by another filter
    last = candidate;
    before += weights[candidate.id];
    if (before >= target) break;
  }
  return last;
}

}  // namespace shardline
