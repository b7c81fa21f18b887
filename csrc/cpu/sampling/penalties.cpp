#include "runtime/thread_pool.h"
#include "sampling/sampling.h"

namespace shardline {

// Adds the bias first, then applies the penalties: repetition over prompt and output, presence and frequency over the
// output.
void penalize(const PenaltyArgs& args) {
  parallel_for_if(args.num_rows > 1 && args.offsets[args.num_rows] > 4096, args.num_rows, [&](int64_t row) {
    float* logits = args.logits + row * args.logits_stride;
    const float repetition = args.repetition[row], presence = args.presence[row], frequency = args.frequency[row];
    for (int32_t i = args.offsets[row]; i < args.offsets[row + 1]; ++i) {
      const int32_t count = args.output_counts[i];
      float logit = logits[args.ids[i]] + args.bias[i];
      if (count > 0 || args.in_prompt[i] != 0) logit = logit > 0.0f ? logit / repetition : logit * repetition;
      if (count > 0) logit = logit - frequency * static_cast<float>(count) - presence;
      logits[args.ids[i]] = logit;
    }
  });
}

}  // namespace shardline
