// Attention over latents (MLA, absorbed): one cached row per token is the key of all heads, and its first part is their
// value. A row is one head of one token, and rows lie in the lanes of vectors. Scores are [key][row], so that a softmax
// never crosses lanes, and outputs are [dim][row]. This file decides which rows form a tile, and which tiles meet which
// splits.
#include "attention/mla_tile.h"
#include "attention/tile_tasks.h"
#include "dispatch/variant.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int64_t kMaxPartialBytes = 64 << 20;

// Computes all splits of a tile, one after another.
template <class T>
void attend_tile(const MlaAttentionArgs& args, const TileIndex& index) {
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

// If there are few tiles, every split of a tile is a task. Otherwise a task is a whole tile.
template <class T>
void attend(const MlaAttentionArgs& args) {
  const RowTiles<MlaAttentionArgs> tiles(args, args.num_heads, kMlaTileRows);
  const int64_t size = MlaTile<T>::output_size(args), stride = size + 2 * kMlaTileRows;
  const int64_t num_splits = ceil_div(tiles.longest_context(), kSplitKeys);
  const bool split_up = num_threads() > 1 && tiles.count() < 2 * num_threads() &&
                        tiles.count() * num_splits * stride * 4 <= kMaxPartialBytes;
  TileTasks tasks(tiles.count(), 1, [&](int64_t tile) {
    return split_up ? max64(1, MlaTile<T>(args, tiles.at(tile)).end_split()) : 1;
  });
  float* partials = split_up ? new float[static_cast<size_t>(tasks.count() * stride)] : nullptr;
  const auto partial_of = [&](int64_t task) {
    float* at = partials + task * stride;
    return MlaPartial{at, at + kMlaTileRows, at + 2 * kMlaTileRows};
  };
  tasks.run(
      [&](const TileTasks::Task& task, const TileTasks::Task&) {
        if (tasks.parts_of(task.group) == 1) return attend_tile<T>(args, tiles.at(task.group));
        MlaTile<T> tile(args, tiles.at(task.group));
        ScratchMemory memory(static_cast<char*>(thread_scratch(MlaTile<T>::scratch_bytes(args))));
        tile.prepare(memory);
        MlaPartial partial = partial_of(task.first_task + task.part);
        tile.attend(task.part, partial);
      },
      [&](const TileTasks::Task& task) {
        const int64_t parts = tasks.parts_of(task.group);
        if (parts == 1) return;
        const MlaTile<T> tile(args, tiles.at(task.group));
        MlaPartial merged = partial_of(task.first_task);
        for (int64_t split = 1; split < parts; ++split) tile.merge(merged, partial_of(task.first_task + split), split);
        tile.store_output(merged);
      });
  delete[] partials;
}

}  // namespace

void mla_attention(const MlaAttentionArgs& args) {
  args.dtype == DType::kFloat32 ? attend<float>(args) : attend<bf16>(args);
}

}  // namespace shardline::SHARDLINE_ISA
