// Chooses the experts of each token: plain fp32 arithmetic in a fixed order, one token at a time.
#include <cmath>
#include <limits>

#include "moe/experts.h"
#include "runtime/thread_pool.h"

namespace shardline {
namespace {

constexpr int64_t kSmallWork = 1 << 13;
constexpr float kNever = -std::numeric_limits<float>::infinity();

void sigmoids(const float* logits, int64_t count, float* out) {
  kernels().exp_shifted(logits, count, 0.0f, -1.0f, out);
  for (int64_t i = 0; i < count; ++i) out[i] = 1.0f / (1.0f + out[i]);
}

void softmax(const float* logits, int64_t count, float* out) {
  kernels().exp_shifted(logits, count, logits[kernels().argmax(logits, count)], 1.0f, out);
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum += out[i];
  for (int64_t i = 0; i < count; ++i) out[i] /= sum;
}

// The lowest index of the largest value. It is a valid index even if all values are NaN or used up.
int64_t best_of(const float* values, int64_t count) {
  int64_t best = 0;
  for (int64_t i = 1; i < count; ++i) {
    if (values[i] > values[best] || (values[best] != values[best] && values[i] == values[i])) best = i;
  }
  return best;
}

float group_score(const float* values, int64_t count, bool top2_sum) {
  const int64_t best = best_of(values, count);
  if (!top2_sum) return values[best];
  float second = kNever;
  for (int64_t i = 0; i < count; ++i) {
    if (i != best && values[i] > second) second = values[i];
  }
  return values[best] + second;
}

// Leaves only the experts of the best groups eligible.
void keep_best_groups(const RouteArgs& args, float* eligible, float* scores) {
  const int64_t size = args.num_experts / args.num_groups;
  for (int64_t g = 0; g < args.num_groups; ++g) scores[g] = group_score(eligible + g * size, size, args.top2_sum);
  for (int64_t kept = 0; kept < args.top_groups; ++kept) scores[best_of(scores, args.num_groups)] = NAN;
  for (int64_t g = 0; g < args.num_groups; ++g) {
    if (scores[g] != scores[g]) continue;
    for (int64_t i = g * size; i < (g + 1) * size; ++i) eligible[i] = kNever;
  }
}

void route_token(const RouteArgs& args, int64_t token) {
  const int64_t count = args.num_experts, chosen = args.experts_per_token;
  float* scores = static_cast<float*>(thread_scratch(static_cast<size_t>(3 * count) * sizeof(float)));
  float* eligible = scores + count;
  const float* logits = args.logits + token * args.logits_stride;
  args.sigmoid ? sigmoids(logits, count, scores) : softmax(logits, count, scores);
  for (int64_t i = 0; i < count; ++i) eligible[i] = args.bias == nullptr ? scores[i] : scores[i] + args.bias[i];
  if (args.top_groups < args.num_groups) keep_best_groups(args, eligible, eligible + count);
  int32_t* ids = args.ids + token * chosen;
  float* weights = args.weights + token * chosen;
  float sum = 0.0f;
  for (int64_t slot = 0; slot < chosen; ++slot) {
    const int64_t best = best_of(eligible, count);
    eligible[best] = NAN;  // less than an expert that is not eligible, so that no expert is chosen twice
    ids[slot] = static_cast<int32_t>(best);
    weights[slot] = scores[best];
    sum += weights[slot];
  }
  for (int64_t slot = 0; slot < chosen; ++slot) {
    if (args.normalized) weights[slot] /= sum + 1e-20f;
    weights[slot] *= args.scale;
  }
  if (args.shared_scale != nullptr) sigmoids(logits + count, 1, args.shared_scale + token);
}

}  // namespace

void route(const RouteArgs& args) {
  parallel_for_if(args.num_tokens * args.num_experts > kSmallWork, args.num_tokens,
                  [&](int64_t token) { route_token(args, token); });
  if (args.counts == nullptr) return;
  for (int64_t slot = 0; slot < args.num_tokens * args.experts_per_token; ++slot) ++args.counts[args.ids[slot]];
}

}  // namespace shardline
