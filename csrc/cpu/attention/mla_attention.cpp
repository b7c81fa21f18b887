// Attention over latents (MLA, absorbed): one cached row per token is the key of all heads, and its first part is their
// value. A row is one head of one token, and rows lie in the lanes of vectors. Scores are [key][row], so that a softmax
// never crosses lanes, and outputs are [dim][row]. This file decides which rows form a tile, and which tiles meet which
// splits.
#include "attention/mla_tile.h"
#include "dispatch/variant.h"
#include "runtime/thread_pool.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int64_t kMaxPartialBytes = 64 << 20;

// The tiles of a call, counted over sequences, then rows.
class Tiles {
 public:
  explicit Tiles(const MlaAttentionArgs& args) : args_(args), first_(new int64_t[args.num_sequences + 1]) {
    first_[0] = 0;
    for (int64_t s = 0; s < args.num_sequences; ++s) first_[s + 1] = first_[s] + ceil_div(rows(s), kMlaTileRows);
  }
  ~Tiles() { delete[] first_; }
  Tiles(const Tiles&) = delete;

  int64_t count() const { return first_[args_.num_sequences]; }

  MlaTileIndex at(int64_t tile) const {
    int64_t low = 0, high = args_.num_sequences - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (first_[middle] <= tile) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int64_t first_row = (tile - first_[low]) * kMlaTileRows;
    return {low, first_row, static_cast<int>(min64(kMlaTileRows, rows(low) - first_row))};
  }

  int64_t longest_context() const {
    int64_t longest = 0;
    for (int64_t s = 0; s < args_.num_sequences; ++s) longest = max64(longest, args_.context_lens[s]);
    return longest;
  }

 private:
  int64_t rows(int64_t sequence) const {
    return (args_.query_starts[sequence + 1] - args_.query_starts[sequence]) * args_.num_heads;
  }

  const MlaAttentionArgs& args_;
  int64_t* first_;
};

// Computes all splits of a tile, one after another.
template <class T>
void attend_tile(const MlaAttentionArgs& args, const MlaTileIndex& index) {
  MlaTile<T> tile(args, index);
  ScratchMemory memory(static_cast<char*>(thread_scratch(MlaTile<T>::scratch_bytes(args))));
  tile.prepare(memory);
  MlaPartial partial = memory.take_partial(MlaTile<T>::output_size(args));
  MlaPartial merged = memory.take_partial(MlaTile<T>::output_size(args));
  for (int64_t split = 0; split < tile.end_split(); ++split) {
    tile.attend(split, split == 0 ? merged : partial);
    if (split > 0) tile.merge(merged, partial, split);
  }
  tile.store_output(merged);
}

// For a few tiles with long contexts, every (tile, split) is a task of its own. Then every tile merges its splits, in
// index order as always.
template <class T>
void attend_wide(const MlaAttentionArgs& args, const Tiles& tiles, int64_t num_splits) {
  const int64_t size = MlaTile<T>::output_size(args), stride = size + 2 * kMlaTileRows;
  float* partials = new float[static_cast<size_t>(tiles.count() * num_splits * stride)];
  const auto place = [&](int64_t tile, int64_t split) {
    float* at = partials + (tile * num_splits + split) * stride;
    return MlaPartial{at, at + kMlaTileRows, at + 2 * kMlaTileRows};
  };
  parallel_for(tiles.count() * num_splits, [&](int64_t task) {
    const int64_t index = task / num_splits, split = task % num_splits;
    MlaTile<T> tile(args, tiles.at(index));
    if (split >= tile.end_split()) return;
    ScratchMemory memory(static_cast<char*>(thread_scratch(MlaTile<T>::scratch_bytes(args))));
    tile.prepare(memory);
    MlaPartial partial = place(index, split);
    tile.attend(split, partial);
  });
  parallel_for(tiles.count(), [&](int64_t index) {
    const MlaTile<T> tile(args, tiles.at(index));
    MlaPartial merged = place(index, 0);
    for (int64_t split = 1; split < tile.end_split(); ++split) tile.merge(merged, place(index, split), split);
    tile.store_output(merged);
  });
  delete[] partials;
}

template <class T>
void attend(const MlaAttentionArgs& args) {
  const Tiles tiles(args);
  if (tiles.count() == 0) return;
  const int64_t num_splits = ceil_div(tiles.longest_context(), kSplitKeys);
  const int64_t partial_bytes = tiles.count() * num_splits * (MlaTile<T>::output_size(args) + 2 * kMlaTileRows) * 4;
  if (num_splits > 1 && tiles.count() < 2 * num_threads() && num_threads() > 1 && partial_bytes <= kMaxPartialBytes) {
    return attend_wide<T>(args, tiles, num_splits);
  }
  // Late tiles of a prompt see the most keys. They go first, so that no thread is left with one at the end.
  parallel_for(tiles.count(), [&](int64_t task) { attend_tile<T>(args, tiles.at(tiles.count() - 1 - task)); });
}

}  // namespace

void mla_attention(const MlaAttentionArgs& args) {
  args.dtype == DType::kFloat32 ? attend<float>(args) : attend<bf16>(args);
}

}  // namespace shardline::SHARDLINE_ISA
