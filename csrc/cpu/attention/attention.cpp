// Causal attention over a paged KV cache or over latents, for prefill and decode alike. This file decides which rows
// meet which splits, and on which thread.
#include "attention/attention_sharing.h"
#include "attention/attention_tile.h"
#include "attention/tile_tasks.h"
#include "dispatch/variant.h"
#include "runtime/thread_pool.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr size_t kMaxPartialBytes = 64 << 20;

// The number of rows of a call, over all heads.
int64_t num_places(const AttentionArgs& args) { return args.query_starts[args.num_sequences] * args.num_heads; }

// Computes all splits of a tile, one after another, except those that the sequence shares: they are computed already.
template <class Tile>
void attend_tile(const AttentionArgs& args, const TileIndex& index, const NextPanels& next, int64_t num_shared,
                 const PartialMemory* shared) {
  const int64_t width = Tile::output_width(args), num_rows = index.num_rows;
  Tile tile(args, index);
  float* outputs = reinterpret_cast<float*>(tile.prepare(num_rows * width));
  Partial merged[Tile::kMostRows];
  bool first[Tile::kMostRows];  // whether nothing is merged yet
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
    const NextPanels after = split + 1 < tile.end_split() ? tile.first_panels(split + 1) : next;
    tile.attend(split, after,
                [&](int64_t first_row, int count, const Row* rows) { take(split, first_row, count, rows); });
  }
}

// The number of rows in a tile changes no result, so tiles have as many rows as leave each thread some tiles.
// num_tiles(tile_rows) counts them.
template <class Tile, class NumTiles>
int64_t choose_tile_rows(const NumTiles& num_tiles) {
  int64_t tile_rows = Tile::kMostRows;
  while (tile_rows > kFewestTileRows && num_tiles(tile_rows) < 4 * num_threads()) tile_rows /= 2;
  return tile_rows;
}

// The rows of all sequences that share a split meet it as one tile.
template <class Tile>
void attend_shared(const AttentionArgs& args, const SharedRun& run, PartialMemory& partials) {
  const int64_t first_token = args.query_starts[run.first_sequence], num_heads = args.num_kv_heads;
  const int64_t num_rows = (args.query_starts[run.end_sequence] - first_token) * (args.num_heads / num_heads);
  const auto num_tiles = [&](int64_t tile_rows) { return ceil_div(num_rows, tile_rows) * num_heads; };
  const int64_t tile_rows = choose_tile_rows<Tile>(num_tiles);
  parallel_for(num_tiles(tile_rows), [&](int64_t task) {
    const int64_t first_row = task / num_heads * tile_rows;
    // A position that sees the whole split, as every row here does.
    const int64_t position = (run.split + 1) * kSplitKeys - 1;
    Tile tile(args,
              {run.first_sequence, task % num_heads, first_row, min64(tile_rows, num_rows - first_row), position});
    tile.prepare();
    tile.attend(run.split, tile.first_panels(run.split), [&](int64_t first, int count, const Row* rows) {
      for (int r = 0; r < count; ++r) {
        partials.put(run.split * num_places(args) + tile.place(first + r), rows[r].partial);
      }
    });
  });
}

// Computes one split of a tile; its rows' partials begin at `place`.
template <class Tile>
void attend_one_split(const AttentionArgs& args, const TileIndex& index, int64_t split, const NextPanels& next,
                      PartialMemory& partials, int64_t place) {
  for (int64_t r = 0; r < index.num_rows; ++r) partials.clear(place + r);
  Tile tile(args, index);
  tile.prepare();
  tile.attend(split, next, [&](int64_t first_row, int count, const Row* rows) {
    for (int r = 0; r < count; ++r) partials.put(place + first_row + r, rows[r].partial);
  });
}

// Merges the splits that a tile shares with others, and then its own, in index order. Its rows' own partials begin at
// `place`, those of the next split follow at a distance of `stride`.
template <class Tile>
void merge_splits(const AttentionArgs& args, const TileIndex& index, int64_t num_shared, const PartialMemory& shared,
                  int64_t num_own, const PartialMemory& own, int64_t place, int64_t stride) {
  const Tile tile(args, index);
  const size_t width = static_cast<size_t>(Tile::output_width(args));
  Partial merged = {0.0f, 0.0f, static_cast<float*>(thread_scratch(width * sizeof(float)))};
  for (int64_t r = 0; r < index.num_rows; ++r) {
    bool first = true;
    const auto take = [&](const Partial& next) {
      Row row = {};
      row.partial = next;
      merge_rows(&merged, &row, 1, &first, args.value_dim);
      first = false;
    };
    for (int64_t split = 0; split < num_shared; ++split) take(shared.get(split * num_places(args) + tile.place(r)));
    for (int64_t i = 0; i < num_own; ++i) {
      if (own.has(place + i * stride + r)) take(own.get(place + i * stride + r));
    }
    tile.store_output(r, merged);
  }
}

// Computes the partials of some splits, in place of results.
template <class Tile>
void attend_partials(const AttentionArgs& args) {
  const AttentionPartials& to = args.partials;
  const int64_t num_heads = args.num_kv_heads, rows_per_token = args.num_heads / num_heads;
  const RowTiles tiles(args, rows_per_token, choose_tile_rows<Tile>([&](int64_t tile_rows) {
                         return RowTiles::count(args, rows_per_token, tile_rows) * num_heads * to.num_splits;
                       }));
  parallel_for(tiles.count() * num_heads * to.num_splits, [&](int64_t task) {
    const int64_t i = task % to.num_splits, group = task / to.num_splits;
    const TileIndex index = tiles.at(group / num_heads, group % num_heads);
    Tile tile(args, index);
    const auto put = [&](int64_t r, float max, float sum, const float* output) {
      const int64_t place = i * num_places(args) + tile.place(r);
      to.maxima[place] = max;
      to.sums[place] = sum;
      for (int64_t d = 0; d < args.value_dim; ++d) {
        to.outputs[place * args.value_dim + d] = output == nullptr ? 0.0f : output[d];
      }
    };
    for (int64_t r = 0; r < index.num_rows; ++r) put(r, -__builtin_inff(), 0.0f, nullptr);
    const int64_t split = to.first_split + i * to.split_step;
    if (split < tile.first_split() || split >= tile.end_split()) return;
    tile.prepare();
    tile.attend(split, tile.first_panels(split), [&](int64_t first_row, int count, const Row* rows) {
      for (int r = 0; r < count; ++r) {
        const Partial& partial = rows[r].partial;
        put(first_row + r, partial.max, partial.sum, partial.output);
      }
    });
  });
}

// Merges the partials of one row in index order.
template <class T>
void merge_row(const MergePartialsArgs& args, int64_t row) {
  const int64_t dim = args.value_dim, width = whole_vectors(dim), num_rows = args.num_tokens * args.num_heads;
  auto* memory = static_cast<float*>(thread_scratch(static_cast<size_t>(2 * width) * sizeof(float)));
  Partial merged = {0.0f, 1.0f, memory};
  for (int64_t d = 0; d < width; ++d) memory[d] = 0.0f;
  Row next = {};
  next.partial.output = memory + width;
  bool first = true;
  for (int64_t i = 0; i < args.num_splits * args.num_ranks; ++i) {
    const int64_t place = (i % args.num_ranks * args.num_splits + i / args.num_ranks) * num_rows + row;
    if (args.sums[place] == 0.0f) continue;
    next.partial.max = args.maxima[place];
    next.partial.sum = args.sums[place];
    for (int64_t d = 0; d < dim; d += kLanes) {
      store(next.partial.output + d, load_n(args.outputs + place * dim + d, dim - d));
    }
    merge_rows(&merged, &next, 1, &first, dim);
    first = false;
  }
  const float* sink = args.sinks == nullptr ? nullptr : args.sinks + row % args.num_heads;
  store_mean(static_cast<T*>(args.out) + row * dim, merged, sink, dim);
}

// In decode, and if there are few tiles, every split of a tile is a task. Otherwise a task is a whole tile.
template <class Tile>
void attend(const AttentionArgs& args) {
  if (args.partials.sums != nullptr) return attend_partials<Tile>(args);
  const int64_t num_heads = args.num_kv_heads, rows_per_token = args.num_heads / num_heads;
  const RowTiles tiles(args, rows_per_token, choose_tile_rows<Tile>([&](int64_t tile_rows) {
                         return RowTiles::count(args, rows_per_token, tile_rows) * num_heads;
                       }));
  if (tiles.count() == 0) return;
  const int64_t width = Tile::output_width(args);
  const size_t most_splits = kMaxPartialBytes / PartialMemory::num_bytes(num_places(args), width);
  const int64_t most_shared = min64(tiles.longest_context() / kSplitKeys, static_cast<int64_t>(most_splits));
  const SharedSplits sharing(args, most_shared);
  PartialMemory shared(sharing.num_splits() * num_places(args), width);
  for (int64_t i = 0; i < sharing.num_runs(); ++i) attend_shared<Tile>(args, sharing.run(i), shared);

  const bool are_few = num_threads() > 1 && tiles.count() * num_heads < 2 * num_threads();
  const int64_t most_rows = are_few ? Tile::kMostRows : Tile::kBlockRows;
  int64_t rows = 0, num_parts = 0;  // of tiles whose splits are tasks: rows of the largest, and the sum of their parts
  const auto first_split = [&](const TileIndex& index) {
    return max64(Tile(args, index).first_split(), sharing.splits_of(index.sequence));
  };
  const auto end_split = [&](const TileIndex& index) { return Tile(args, index).end_split(); };
  const auto parts_of = [&](int64_t tile) {
    const TileIndex index = tiles.at(tile, 0);
    return index.num_rows > most_rows ? 1 : max64(1, end_split(index) - first_split(index));
  };
  for (int64_t tile = 0; tile < tiles.count(); ++tile) {
    if (parts_of(tile) > 1) rows = max64(rows, tiles.at(tile, 0).num_rows);
    num_parts += parts_of(tile);
  }
  const bool fits = PartialMemory::num_bytes(num_parts * num_heads * rows, width) <= kMaxPartialBytes;
  TileTasks tasks(tiles.count(), num_heads, [&](int64_t tile) { return fits ? parts_of(tile) : 1; });
  PartialMemory partials(fits ? tasks.count() * rows : 0, width);
  tasks.run(
      [&](const TileTasks::Task& task, const TileTasks::Task& following) {
        const TileIndex index = tiles.at(task.group, task.tile), after = tiles.at(following.group, following.tile);
        const int64_t next_split = min64(first_split(after) + following.part, end_split(after) - 1);
        const NextPanels next = Tile(args, after).first_panels(next_split);
        if (tasks.parts_of(task.group) == 1) {
          attend_tile<Tile>(args, index, next, sharing.splits_of(index.sequence), &shared);
        } else {
          const int64_t place = (task.first_task + task.part * num_heads) * rows;
          attend_one_split<Tile>(args, index, first_split(index) + task.part, next, partials, place);
        }
      },
      [&](const TileTasks::Task& task) {
        const int64_t parts = tasks.parts_of(task.group);
        if (parts == 1) return;
        const TileIndex index = tiles.at(task.group, task.tile);
        merge_splits<Tile>(args, index, sharing.splits_of(index.sequence), shared, parts, partials,
                           task.first_task * rows, num_heads * rows);
      });
}

}  // namespace

void paged_attention(const AttentionArgs& args) {
  const bool is_fp32 = args.dtype == DType::kFloat32;
  if (args.value_cache == nullptr && args.key_scales != nullptr) {
    is_fp32 ? attend<RowTile<float, int8_t, true>>(args) : attend<RowTile<bf16, int8_t, true>>(args);
  } else if (args.value_cache == nullptr) {
    is_fp32 ? attend<RowTile<float, float, true>>(args) : attend<RowTile<bf16, bf16, true>>(args);
  } else if (args.key_scales != nullptr) {
    is_fp32 ? attend<RowTile<float, int8_t, false>>(args) : attend<RowTile<bf16, int8_t, false>>(args);
  } else {
    is_fp32 ? attend<RowTile<float, float, false>>(args) : attend<RowTile<bf16, bf16, false>>(args);
  }
}

void merge_partials(const MergePartialsArgs& args) {
  parallel_for(args.num_tokens * args.num_heads, [&](int64_t row) {
    args.dtype == DType::kFloat32 ? merge_row<float>(args, row) : merge_row<bf16>(args, row);
  });
}

}  // namespace shardline::SHARDLINE_ISA
