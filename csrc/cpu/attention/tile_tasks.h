// Divides the rows of a call into tiles, and tiles into tasks for all threads, with one barrier: whichever thread
// completes the last part of a tile also merges the tile. Parts merge in index order, so it does not matter which
// thread that is.
#pragma once

#include "attention/attention_args.h"
#include "runtime/thread_pool.h"
#include "simd/vec.h"

namespace shardline::SHARDLINE_ISA {

// Query rows of a sequence that share its keys, of one KV head if there are several.
struct TileIndex {
  int64_t sequence, kv_head, first_row, num_rows;
  int64_t first_position;  // of the sequence's first token
};

// The tiles of a call, in the order of sequences, then rows. Here and below arrays are plain: a file compiled for an
// ISA uses no containers of the standard library, see vec.h.
class RowTiles {
 public:
  RowTiles(const AttentionArgs& args, int64_t rows_per_token, int64_t tile_rows)
      : count_(count(args, rows_per_token, tile_rows)), tiles_(new TileIndex[static_cast<size_t>(count_)]) {
    int64_t place = 0;
    for (int64_t s = 0; s < args.num_sequences; ++s) {
      const int64_t num_tokens = args.query_starts[s + 1] - args.query_starts[s];
      const int64_t num_rows = num_tokens * rows_per_token;
      longest_context_ = max64(longest_context_, args.context_lens[s]);
      for (int64_t first = 0; first < num_rows; first += tile_rows) {
        tiles_[place++] = {s, 0, first, min64(tile_rows, num_rows - first), args.context_lens[s] - num_tokens};
      }
    }
  }
  ~RowTiles() { delete[] tiles_; }
  RowTiles(const RowTiles&) = delete;

  static int64_t count(const AttentionArgs& args, int64_t rows_per_token, int64_t tile_rows) {
    int64_t sum = 0;
    for (int64_t s = 0; s < args.num_sequences; ++s) {
      sum += ceil_div((args.query_starts[s + 1] - args.query_starts[s]) * rows_per_token, tile_rows);
    }
    return sum;
  }

  int64_t count() const { return count_; }
  int64_t longest_context() const { return longest_context_; }
  TileIndex at(int64_t tile, int64_t kv_head = 0) const {
    TileIndex index = tiles_[tile];
    index.kv_head = kv_head;
    return index;
  }

 private:
  const int64_t count_;
  TileIndex* const tiles_;
  int64_t longest_context_ = 0;
};

class TileTasks {
 public:
  struct Task {
    int64_t group, tile, part;
    int64_t first_task;  // of the tile; those of its other parts follow at a distance of tiles_per_group
  };

  // Groups of tiles that have equally many parts each; parts_of(group) is at least 1.
  template <class PartsOf>
  TileTasks(int64_t num_groups, int64_t tiles_per_group, const PartsOf& parts_of)
      : num_groups_(num_groups),
        tiles_(tiles_per_group),
        first_(new int64_t[num_groups + 1]),
        left_(new int32_t[num_groups * tiles_per_group]) {
    first_[0] = 0;
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t parts = parts_of(group);
      first_[group + 1] = first_[group] + parts * tiles_;
      for (int64_t tile = 0; tile < tiles_; ++tile) left_[group * tiles_ + tile] = static_cast<int32_t>(parts);
    }
  }
  ~TileTasks() {
    delete[] first_;
    delete[] left_;
  }
  TileTasks(const TileTasks&) = delete;

  int64_t count() const { return first_[num_groups_]; }
  int64_t parts_of(int64_t group) const { return (first_[group + 1] - first_[group]) / tiles_; }

  // Calls compute(task, next) for every task, where `next` is the task that the thread probably gets afterwards, and
  // merge(task) after the last part of a tile.
  template <class Compute, class Merge>
  void run(const Compute& compute, const Merge& merge) {
    // Late tiles of a prompt see the most keys. They go first, so that no thread is left with one at the end.
    parallel_for(count(), [&](int64_t reversed) {
      const Task task = at(count() - 1 - reversed);
      compute(task, at(max64(0, count() - 2 - reversed)));
      if (__atomic_sub_fetch(&left_[task.group * tiles_ + task.tile], 1, __ATOMIC_ACQ_REL) == 0) merge(task);
    });
  }

 private:
  Task at(int64_t task) const {
    int64_t low = 0, high = num_groups_ - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (first_[middle] <= task) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int64_t place = task - first_[low], tile = place % tiles_;
    return {low, tile, place / tiles_, first_[low] + tile};
  }

  const int64_t num_groups_, tiles_;
  int64_t* first_;
  int32_t* left_;
};

}  // namespace shardline::SHARDLINE_ISA
