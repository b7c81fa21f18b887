// Causal attention over a paged KV cache, for prefill and decode alike. This file decides which rows meet which splits,
// and on which thread.
#include "attention/attention_sharing.h"
#include "attention/attention_tile.h"
#include "dispatch/variant.h"
#include "runtime/thread_pool.h"

namespace shardline::SHARDLINE_ISA {
namespace {

// The most rows that pass over a split together: they share the work of packing it, and their outputs stay in L2.
constexpr int64_t kMostTileRows = 480;
constexpr size_t kMaxPartialBytes = 64 << 20;

// The number of rows of a call, over all heads.
int64_t num_places(const AttentionArgs& args) { return args.query_starts[args.num_sequences] * args.num_heads; }

// Computes all splits of a tile, one after another, except those that the sequence shares: they are computed already.
template <class T, class Stored>
void attend_tile(const AttentionArgs& args, const TileIndex& index, int64_t num_shared, const PartialMemory* shared) {
  const int64_t width = RowTile<T, Stored>::output_width(args), num_rows = index.num_rows;
  RowTile<T, Stored> tile(args, index);
  const size_t num_words = RowTile<T, Stored>::scratch_words(args, num_rows) + static_cast<size_t>(num_rows * width);
  float* outputs =
      reinterpret_cast<float*>(tile.prepare(static_cast<int32_t*>(thread_scratch(num_words * sizeof(int32_t)))));
  Partial merged[kMostTileRows];
  bool first[kMostTileRows];  // whether nothing is merged yet
  for (int64_t r = 0; r < num_rows; ++r) {
    merged[r].output = outputs + r * width;
    first[r] = true;
  }
  const auto take = [&](int64_t split, int64_t first_row, int count, const Row* rows) {
    merge_rows(merged + first_row, rows, count, first + first_row, args.value_dim);
    for (int64_t r = first_row; r < first_row + count; ++r) {
      first[r] = false;
      if (split + 1 == tile.end_split(r)) tile.store_output(r, merged[r]);
    }
  };
  for (int64_t split = 0; split < num_shared; ++split) {
    for (int64_t r = 0; r < num_rows; ++r) {
      Row row = {};
      row.partial = shared->get(split * num_places(args) + tile.place(r));
      take(split, r, 1, &row);
    }
  }
  for (int64_t split = max64(tile.first_split(), num_shared); split < tile.end_split(); ++split) {
    tile.attend(split, [&](int64_t first_row, int count, const Row* rows) { take(split, first_row, count, rows); });
  }
}

// The tiles of a call, counted over sequences, then rows, then KV heads. The number of rows in a tile changes no
// result, so tiles have as many rows as leave each thread some tiles.
class Tiles {
 public:
  explicit Tiles(const AttentionArgs& args) : args_(args), first_(new int64_t[args.num_sequences + 1]) {
    for (tile_rows_ = kMostTileRows; !divide(); tile_rows_ /= 2) {}
  }
  ~Tiles() { delete[] first_; }
  Tiles(const Tiles&) = delete;

  int64_t count() const { return first_[args_.num_sequences] * args_.num_kv_heads; }
  int64_t tile_rows() const { return tile_rows_; }

  TileIndex at(int64_t tile) const {
    const int64_t place = tile / args_.num_kv_heads;
    int64_t low = 0, high = args_.num_sequences - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (first_[middle] <= place) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int64_t first_row = (place - first_[low]) * tile_rows_;
    return {low, tile % args_.num_kv_heads, first_row, min64(tile_rows_, rows_of(args_, low) - first_row),
            first_position_of(args_, low)};
  }

  int64_t longest_context() const {
    int64_t longest = 0;
    for (int64_t s = 0; s < args_.num_sequences; ++s) longest = max64(longest, args_.context_lens[s]);
    return longest;
  }

 private:
  // Whether tiles of tile_rows_ rows leave each thread enough tiles.
  bool divide() {
    first_[0] = 0;
    for (int64_t s = 0; s < args_.num_sequences; ++s) {
      first_[s + 1] = first_[s] + ceil_div(rows_of(args_, s), tile_rows_);
    }
    return tile_rows_ == kFewestTileRows || count() >= 4 * num_threads();
  }

  const AttentionArgs& args_;
  int64_t* first_;
  int64_t tile_rows_;
};

// For a few tiles with long contexts, every (tile, split) is a task of its own. Then every tile merges its splits, in
// index order as always.
template <class T, class Stored>
void attend_wide(const AttentionArgs& args, const Tiles& tiles, int64_t num_splits) {
  const int64_t width = RowTile<T, Stored>::output_width(args), tile_rows = tiles.tile_rows();
  PartialMemory partials(tiles.count() * num_splits * tile_rows, width);
  const auto place = [&](int64_t tile, int64_t split, int64_t r) {
    return (tile * num_splits + split) * tile_rows + r;
  };
  parallel_for(tiles.count() * num_splits, [&](int64_t task) {
    const int64_t index = task / num_splits, split = task % num_splits;
    for (int64_t r = 0; r < tile_rows; ++r) partials.clear(place(index, split, r));
    RowTile<T, Stored> tile(args, tiles.at(index));
    if (split < tile.first_split() || split >= tile.end_split()) return;
    const size_t num_words = RowTile<T, Stored>::scratch_words(args, tile_rows);
    tile.prepare(static_cast<int32_t*>(thread_scratch(num_words * sizeof(int32_t))));
    tile.attend(split, [&](int64_t first_row, int count, const Row* rows) {
      for (int r = 0; r < count; ++r) partials.put(place(index, split, first_row + r), rows[r].partial);
    });
  });
  parallel_for(tiles.count(), [&](int64_t index) {
    const RowTile<T, Stored> tile(args, tiles.at(index));
    for (int64_t r = 0; r < tiles.at(index).num_rows; ++r) {
      Partial merged = {0.0f, 0.0f, static_cast<float*>(thread_scratch(static_cast<size_t>(width) * sizeof(float)))};
      bool first = true;
      for (int64_t split = 0; split < num_splits; ++split) {
        if (!partials.has(place(index, split, r))) continue;
        Row row = {};
        row.partial = partials.get(place(index, split, r));
        merge_rows(&merged, &row, 1, &first, args.value_dim);
        first = false;
      }
      tile.store_output(r, merged);
    }
  });
}

// The rows of all sequences that share a split meet it as one tile.
template <class T, class Stored>
void attend_shared(const AttentionArgs& args, const SharedRun& run, PartialMemory& partials) {
  const int64_t first_token = args.query_starts[run.first_sequence];
  const int64_t num_tokens = args.query_starts[run.end_sequence] - first_token;
  const int64_t num_rows = num_tokens * (args.num_heads / args.num_kv_heads);
  int64_t tile_rows = kMostTileRows;
  const auto num_tiles = [&] { return ceil_div(num_rows, tile_rows); };
  while (tile_rows > kFewestTileRows && num_tiles() * args.num_kv_heads < 4 * num_threads()) tile_rows /= 2;
  parallel_for(num_tiles() * args.num_kv_heads, [&](int64_t task) {
    const int64_t first_row = task / args.num_kv_heads * tile_rows;
    // A position that sees the whole split, as every row here does.
    const int64_t position = (run.split + 1) * kSplitKeys - 1;
    RowTile<T, Stored> tile(args, {run.first_sequence, task % args.num_kv_heads, first_row,
                                   min64(tile_rows, num_rows - first_row), position});
    const size_t num_words = RowTile<T, Stored>::scratch_words(args, tile_rows);
    tile.prepare(static_cast<int32_t*>(thread_scratch(num_words * sizeof(int32_t))));
    tile.attend(run.split, [&](int64_t first, int count, const Row* rows) {
      for (int r = 0; r < count; ++r) {
        partials.put(run.split * num_places(args) + tile.place(first + r), rows[r].partial);
      }
    });
  });
}

template <class T, class Stored>
void attend(const AttentionArgs& args) {
  const Tiles tiles(args);
  if (tiles.count() == 0) return;
  const int64_t width = RowTile<T, Stored>::output_width(args), longest_context = tiles.longest_context();
  const int64_t num_splits = ceil_div(longest_context, kSplitKeys);
  const int64_t num_partials = tiles.count() * num_splits * tiles.tile_rows();
  if (num_splits > 1 && tiles.count() < 2 * num_threads() && num_threads() > 1 &&
      PartialMemory::num_bytes(num_partials, width) <= kMaxPartialBytes) {
    return attend_wide<T, Stored>(args, tiles, num_splits);
  }
  const size_t most_splits = kMaxPartialBytes / PartialMemory::num_bytes(num_places(args), width);
  const int64_t most_shared = min64(longest_context / kSplitKeys, static_cast<int64_t>(most_splits));
  const SharedSplits sharing(args, most_shared);
  PartialMemory shared(sharing.num_splits() * num_places(args), width);
  for (int64_t i = 0; i < sharing.num_runs(); ++i) attend_shared<T, Stored>(args, sharing.run(i), shared);
  // Late tiles of a prompt see the most keys. They go first, so that no thread is left with one at the end.
  parallel_for(tiles.count(), [&](int64_t task) {
    const TileIndex index = tiles.at(tiles.count() - 1 - task);
    attend_tile<T, Stored>(args, index, sharing.splits_of(index.sequence), &shared);
  });
}

}  // namespace

void paged_attention(const AttentionArgs& args) {
  if (args.key_scales != nullptr) {
    args.dtype == DType::kFloat32 ? attend<float, int8_t>(args) : attend<bf16, int8_t>(args);
  } else {
    args.dtype == DType::kFloat32 ? attend<float, float>(args) : attend<bf16, bf16>(args);
  }
}

}  // namespace shardline::SHARDLINE_ISA
