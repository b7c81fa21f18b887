// Finds the sequences of a call that keep the keys of a split in the same blocks, as requests with a common prefix do.
// Their rows meet the split together, and its keys are read once. A split's partial results do not depend on that.
#pragma once

#include "attention/attention_args.h"
#include "attention/attention_operands.h"

namespace shardline::SHARDLINE_ISA {

constexpr int64_t kFewestTileRows = 30;  // as many rows use a split well that comes from memory

// The number of a sequence's query rows that share a KV head.
inline int64_t rows_of(const AttentionArgs& args, int64_t sequence) {
  return (args.query_starts[sequence + 1] - args.query_starts[sequence]) * (args.num_heads / args.num_kv_heads);
}
inline int64_t first_position_of(const AttentionArgs& args, int64_t sequence) {
  return args.context_lens[sequence] - (args.query_starts[sequence + 1] - args.query_starts[sequence]);
}

// Consecutive sequences that share a split.
struct SharedRun {
  int64_t split, first_sequence, end_sequence;
};

// Has arrays of its own: a file compiled for an ISA uses no containers of the standard library, see vec.h.
class SharedSplits {
 public:
  // Looks at each sequence's first `most_splits` splits.
  SharedSplits(const AttentionArgs& args, int64_t most_splits) : args_(args) {
    if (args.num_sequences < 2 || args.window > 0 || most_splits < 1) return;
    splits_of_ = new int64_t[args.num_sequences]();
    runs_ = new SharedRun[args.num_sequences / 2 * most_splits];
    while (num_splits_ < most_splits && find_runs(num_splits_)) ++num_splits_;
  }
  ~SharedSplits() {
    delete[] splits_of_;
    delete[] runs_;
  }
  SharedSplits(const SharedSplits&) = delete;

  int64_t num_splits() const { return num_splits_; }
  // How many splits the sequence shares with others, counted from its first.
  int64_t splits_of(int64_t sequence) const { return num_splits_ == 0 ? 0 : splits_of_[sequence]; }

  int64_t num_runs() const { return num_runs_; }
  const SharedRun& run(int64_t i) const { return runs_[i]; }

 private:
  bool find_runs(int64_t split) {
    bool found = false;
    for (int64_t first = 0, end = 0; first < args_.num_sequences; first = end) {
      end = first + 1;
      if (!may_share(first, split)) continue;
      while (end < args_.num_sequences && may_share(end, split) && same_blocks(end - 1, end, split)) ++end;
      if (end - first < 2) continue;
      found = true;
      runs_[num_runs_++] = {split, first, end};
      for (int64_t s = first; s < end; ++s) splits_of_[s] = split + 1;
    }
    return found;
  }

  // Whether all rows of the sequence see all of the split, the rows are too few to use it well alone, and the sequence
  // shares all splits before it.
  bool may_share(int64_t sequence, int64_t split) const {
    const int64_t num_rows = rows_of(args_, sequence);
    return splits_of_[sequence] == split && num_rows > 0 && num_rows < kFewestTileRows &&
           first_position_of(args_, sequence) + 1 >= (split + 1) * kSplitKeys;
  }

  bool same_blocks(int64_t a, int64_t b, int64_t split) const {
    const int64_t first = split * kSplitKeys / args_.block_size;
    const int64_t end = ceil_div((split + 1) * kSplitKeys, args_.block_size);
    const int32_t* tables = args_.block_tables + first;
    return __builtin_memcmp(tables + a * args_.block_table_stride, tables + b * args_.block_table_stride,
                            static_cast<size_t>(end - first) * sizeof(int32_t)) == 0;
  }

  const AttentionArgs& args_;
  int64_t* splits_of_ = nullptr;
  SharedRun* runs_ = nullptr;
  int64_t num_runs_ = 0, num_splits_ = 0;
};

}  // namespace shardline::SHARDLINE_ISA
