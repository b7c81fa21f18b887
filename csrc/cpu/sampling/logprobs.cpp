#include <cmath>
#include <vector>

#include "dispatch/kernels.h"
#include "runtime/thread_pool.h"
#include "sampling/sampling.h"
#include "sampling/selection.h"

namespace shardline {
namespace {

constexpr int64_t kBlock = 1024;

// log(sum(exp(logit))), in the order of ids: exponentials in fp32, their sum in fp64.
double log_sum_exp(const float* logits, int64_t vocab_size, float largest) {
  float weights[kBlock];
  double sum = 0.0;
  for (int64_t begin = 0; begin < vocab_size; begin += kBlock) {
    const int64_t count = vocab_size - begin < kBlock ? vocab_size - begin : kBlock;
    kernels().exp_shifted(logits + begin, count, largest, 1.0f, weights);
    double part[4] = {};
    for (int64_t i = 0; i < count; ++i) part[i % 4] += weights[i];
    sum += (part[0] + part[2]) + (part[1] + part[3]);
  }
  return static_cast<double>(largest) + std::log(sum);
}

void logprobs_row(const LogprobArgs& args, int64_t row) {
  const float* logits = args.logits + row * args.logits_stride;
  const float largest = logits[kernels().argmax(logits, args.vocab_size)];
  const double normalizer = log_sum_exp(logits, args.vocab_size, largest);
  const auto logprob = [&](float logit) { return static_cast<float>(static_cast<double>(logit) - normalizer); };
  const float chosen = logits[args.chosen[row]];
  int64_t rank = 1;
  for (int64_t id = 0; id < args.vocab_size; ++id) rank += logits[id] > chosen;
  args.chosen_logprobs[row] = logprob(chosen);
  args.chosen_ranks[row] = rank;
  if (args.top_n == 0) return;
  static thread_local std::vector<Candidate> top;
  strongest(logits, args.vocab_size, args.top_n, top);
  for (int64_t i = 0; i < args.top_n; ++i) {
    const bool found = i < static_cast<int64_t>(top.size());
    args.top_ids[row * args.top_n + i] = found ? top[static_cast<size_t>(i)].id : -1;
    args.top_logprobs[row * args.top_n + i] = found ? logprob(top[static_cast<size_t>(i)].logit) : -INFINITY;
  }
}

}  // namespace

void logprobs(const LogprobArgs& args) {
  parallel_for(args.num_rows, [&](int64_t row) { logprobs_row(args, row); });
}

}  // namespace shardline
