// Chooses one token per row of logits: the largest logit, or the inverse of the cumulative distribution over the tokens
// that the filters keep.
#include "sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "dispatch/kernels.h"
#include "runtime/thread_pool.h"
#include "sampling/philox.h"
#include "sampling/selection.h"

namespace shardline {
namespace {

constexpr int64_t kSumBlock = 512;
constexpr float kGreedyBelow = 1e-5f;

// What a filter keeps: logits above `logit`, and logits equal to it with ids up to `last_id`.
struct Cutoff {
  float logit;
  int32_t last_id;
  bool keeps(float value, int64_t id) const { return value > logit || (value == logit && id <= last_id); }
};

constexpr Cutoff kKeepAll = {-INFINITY, INT32_MAX};

// Sums in the order of ids, in eight lanes: a fixed order that the compiler can vectorise.
double block_sum(const float* weights, int64_t count) {
  double part[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int lane = 0; lane < 8; ++lane) part[lane] += weights[i + lane];
  }
  for (; i < count; ++i) part[i % 8] += weights[i];
  return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
}

double total(const float* weights, int64_t count) {
  double sum = 0.0;
  for (int64_t i = 0; i < count; i += kSumBlock) sum += block_sum(weights + i, std::min(kSumBlock, count - i));
  return sum;
}

// The id at which the running sum first exceeds target.
int64_t find_quantile(const float* weights, int64_t count, double target) {
  double before = 0.0;
  int64_t last_possible = 0;
  for (int64_t begin = 0; begin < count; begin += kSumBlock) {
    const int64_t end = std::min(count, begin + kSumBlock);
    const double after = before + block_sum(weights + begin, end - begin);
    if (after > before) {
      const bool here = after > target;
      double sum = before;
      for (int64_t id = begin; id < end; ++id) {
        if (weights[id] <= 0.0f) continue;
        last_possible = id;
        sum += weights[id];
        if (here && sum > target) return id;
      }
      if (here) return last_possible;  // the two orders of summation differ in the last bit
    }
    before = after;
  }
  return last_possible;
}

// Logits equal to the k-th largest are kept too, as in other engines.
Cutoff top_k_cutoff(const float* logits, int64_t vocab_size, int64_t k) {
  return {kth_largest(logits, vocab_size, k), INT32_MAX};
}

// The shortest prefix, largest logits first, that holds top_p of the mass of `weights`. It has at least one token.
Cutoff top_p_cutoff(const float* logits, const float* weights, int64_t vocab_size, float top_p) {
  const double target = static_cast<double>(top_p) * total(weights, vocab_size);
  const Candidate last = prefix_end(logits, weights, vocab_size, target);
  return last.id < 0 ? kKeepAll : Cutoff{last.logit, last.id};
}

void drop(const float* logits, float* weights, int64_t vocab_size, Cutoff cutoff) {
  for (int64_t id = 0; id < vocab_size; ++id) {
    if (!cutoff.keeps(logits[id], id)) weights[id] = 0.0f;
  }
}

int64_t sample_row(const float* logits, int64_t vocab_size, const SamplingRow& row, uint32_t purpose) {
  const int64_t best = kernels().argmax(logits, vocab_size);
  // An infinite logit has all the mass. If all logits are -inf or NaN, there is nothing to choose from.
  if (row.temperature < kGreedyBelow || !std::isfinite(logits[best])) return best;
  static thread_local std::vector<float> weight_memory;
  weight_memory.resize(static_cast<size_t>(vocab_size));
  float* weights = weight_memory.data();
  kernels().exp_shifted(logits, vocab_size, logits[best], 1.0f / row.temperature, weights);
  if (row.min_p > 0.0f) {
    for (int64_t id = 0; id < vocab_size; ++id) weights[id] = weights[id] >= row.min_p ? weights[id] : 0.0f;
  }
  if (row.top_k > 0 && row.top_k < vocab_size) {
    drop(logits, weights, vocab_size, top_k_cutoff(logits, vocab_size, row.top_k));
  }
  if (row.top_p < 1.0f) {
    drop(logits, weights, vocab_size, top_p_cutoff(logits, weights, vocab_size, row.top_p));
  }
  const double u = uniform(row.seed, row.choice, row.position, purpose);
  return find_quantile(weights, vocab_size, u * total(weights, vocab_size));
}

}  // namespace

void sample(const SampleArgs& args) {
  parallel_for(args.num_rows, [&](int64_t r) {
    const SamplingRow row = {args.temperature[r],
                             args.top_k[r],
                             args.top_p[r],
                             args.min_p[r],
                             static_cast<uint64_t>(args.seeds[r]),
                             static_cast<uint32_t>(args.choices[r]),
                             static_cast<uint64_t>(args.positions[r])};
    args.tokens[r] = sample_row(args.logits + r * args.logits_stride, args.vocab_size, row, args.purpose);
  });
}

}  // namespace shardline
