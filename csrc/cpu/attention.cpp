// Causal attention over a paged KV cache, for prefill and decode alike: which rows meet which splits, and where.
#include "attention_split.h"
#include "thread_pool.h"
#include "variant.h"

namespace shardline::SHARDLINE_ISA {
namespace {

// Rows that pass over a split together, at most: they share the work of packing it, and their outputs stay in L2.
constexpr int64_t kMostTileRows = 480, kFewestTileRows = 30;
constexpr int64_t kMaxPartialBytes = 64 << 20;

// Query rows of one sequence that share a KV head.
struct TileIndex {
  int64_t sequence, kv_head, first_row, num_rows;
};

// Row r of a sequence's rows for one KV head is token r / group, head r % group. The caches hold elements of Stored.
template <class T, class Stored>
class RowTile {
 public:
  RowTile(const AttentionArgs& args, const TileIndex& index)
      : args_(args),
        index_(index),
        group_(args.num_heads / args.num_kv_heads),
        first_token_(args.query_starts[index.sequence]),
        first_position_(args.context_lens[index.sequence] - (args.query_starts[index.sequence + 1] - first_token_)) {}

  static int64_t output_width(const AttentionArgs& args) { return whole_vectors(args.value_dim); }

  // Four-byte words of scratch memory, for tiles of up to num_rows rows.
  static size_t scratch_words(const AttentionArgs& args, int64_t num_rows) {
    const int64_t row_words = kSplitKeys + output_width(args);
    return static_cast<size_t>(num_rows * query_width(args) + kMaxRows * row_words) +
           Split<T, Stored>::scratch_words(args.key_dim, args.value_dim);
  }

  // Takes scratch_words() of memory, 64-byte aligned, and returns what follows them.
  int32_t* prepare(int32_t* memory) {
    queries_ = memory;
    memory += index_.num_rows * query_width(args_);
    for (int r = 0; r < kMaxRows; ++r) {
      rows_[r].scores = memory;
      rows_[r].partial.output = reinterpret_cast<float*>(memory + kSplitKeys);
      memory += kSplitKeys + output_width(args_);
    }
    split_.prepare(memory, args_.key_dim, args_.value_dim);
    load_queries();
    return memory + Split<T, Stored>::scratch_words(args_.key_dim, args_.value_dim);
  }

  int64_t first_split() const { return visible(0).begin / kSplitKeys; }
  int64_t end_split() const { return end_split(index_.num_rows - 1); }
  int64_t end_split(int64_t r) const { return ceil_div(visible(r).end, kSplitKeys); }

  // Calls take(first_row, num_rows, rows) for the rows that see something of the split, kMaxRows of them at most.
  template <class Take>
  void attend(int64_t split, const Take& take) {
    const int64_t split_begin = split * kSplitKeys;
    find_keys(split_begin);
    int64_t begin = 0, end = index_.num_rows;
    while (begin < end && seen(begin, split_begin).empty()) ++begin;
    while (begin < end && seen(end - 1, split_begin).empty()) --end;
    const int64_t num_parts = ceil_div(end - begin, kMaxRows);
    for (int64_t part = 0; part < num_parts; ++part) {  // evenly: 8 rows are 4 + 4, not 6 + 2
      const int64_t first = begin + (end - begin) * part / num_parts;
      const int num_rows = static_cast<int>(begin + (end - begin) * (part + 1) / num_parts - first);
      for (int r = 0; r < num_rows; ++r) {
        rows_[r].query = queries_ + (first + r) * query_width(args_);
        rows_[r].keys = seen(first + r, split_begin);
      }
      attend_rows<T>(num_rows, rows_, split_, args_);
      take(first, num_rows, rows_);
    }
  }

  void store_output(int64_t r, const Partial& merged) const {
    T* out = static_cast<T*>(args_.out) + ((first_token_ + token(r)) * args_.num_heads + head(r)) * args_.value_dim;
    const F32 factor = broadcast(1.0f / merged.sum);
    for (int64_t d = 0; d < args_.value_dim; d += kLanes) {
      store_n(out + d, load(merged.output + d) * factor, args_.value_dim - d);
    }
  }

 private:
  static int64_t query_width(const AttentionArgs& args) { return whole_vectors(words_of<T>(args.key_dim)); }

  int64_t token(int64_t r) const { return (index_.first_row + r) / group_; }
  int64_t head(int64_t r) const { return index_.kv_head * group_ + (index_.first_row + r) % group_; }

  Range visible(int64_t r) const {
    const int64_t position = first_position_ + token(r);
    return {args_.window > 0 ? max64(0, position - args_.window + 1) : 0, position + 1};
  }
  Range seen(int64_t r, int64_t split_begin) const {
    const Range range = visible(r);
    return {max64(0, range.begin - split_begin), min64(kSplitKeys, range.end - split_begin)};
  }

  void load_queries() {
    const T* token_row = static_cast<const T*>(args_.query) + (first_token_ + token(0)) * args_.query_stride;
    int64_t in_group = index_.first_row % group_;
    int32_t* to = queries_;
    for (int64_t r = 0; r < index_.num_rows; ++r, to += query_width(args_)) {
      const T* from = token_row + (index_.kv_head * group_ + in_group) * args_.key_dim;
      // The next token's, which the hardware may not guess; past the last one it asks for nothing that is used.
      prefetch(from + args_.query_stride, args_.key_dim);
      for (int64_t d = 0; d < args_.key_dim; d += kLanes * kPerWord<T>) {
        store_words(to + d / kPerWord<T>, load_elements<T>(from + d, args_.key_dim - d));
      }
      if (++in_group == group_) {
        in_group = 0;
        token_row += args_.query_stride;
      }
    }
  }

  // Only blocks that some row sees are looked up: those before the window may be freed already.
  void find_keys(int64_t split_begin) {
    const int64_t begin = max64(split_begin, visible(0).begin);
    const int64_t end = min64(split_begin + kSplitKeys, visible(index_.num_rows - 1).end);
    split_.begin({begin - split_begin, end - split_begin});
    const int32_t* block_table = args_.block_tables + index_.sequence * args_.block_table_stride;
    for (int64_t position = begin; position < end;) {
      const int64_t block = block_table[position / args_.block_size];
      const int64_t block_end = min64(end, (position / args_.block_size + 1) * args_.block_size);
      const int64_t head = block * args_.num_kv_heads + index_.kv_head;
      const int64_t slot = head * args_.block_size + position % args_.block_size;
      const Stored* key = static_cast<const Stored*>(args_.key_cache) + slot * args_.key_dim;
      const Stored* value = static_cast<const Stored*>(args_.value_cache) + slot * args_.value_dim;
      for (int64_t i = 0; i < block_end - position; ++i) {
        const int64_t place = position - split_begin + i;
        split_.set(place, key + i * args_.key_dim, value + i * args_.value_dim);
        if constexpr (Split<T, Stored>::kScaled) {
          split_.set_scales(place, args_.key_scales[slot + i], args_.value_scales[slot + i]);
        }
      }
      position = block_end;
    }
  }

  const AttentionArgs& args_;
  const TileIndex index_;
  const int64_t group_, first_token_, first_position_;
  int32_t* queries_ = nullptr;
  Row rows_[kMaxRows];
  Split<T, Stored> split_;
};

// All splits of a tile, one after another.
template <class T, class Stored>
void attend_tile(const AttentionArgs& args, const TileIndex& index) {
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
  for (int64_t split = tile.first_split(); split < tile.end_split(); ++split) {
    tile.attend(split, [&](int64_t first_row, int count, const Row* rows) {
      merge_rows(merged + first_row, rows, count, first + first_row, args.value_dim);
      for (int64_t r = first_row; r < first_row + count; ++r) {
        first[r] = false;
        if (split + 1 == tile.end_split(r)) tile.store_output(r, merged[r]);
      }
    });
  }
}

// The tiles of a call, counted over sequences, then rows, then KV heads. How many rows a tile has does not matter to
// any of them, so it is as many as leave each thread some tiles.
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
    return {low, tile % args_.num_kv_heads, first_row, min64(tile_rows_, rows(low) - first_row)};
  }

  int64_t longest_context() const {
    int64_t longest = 0;
    for (int64_t s = 0; s < args_.num_sequences; ++s) longest = max64(longest, args_.context_lens[s]);
    return longest;
  }

 private:
  int64_t rows(int64_t sequence) const {
    return (args_.query_starts[sequence + 1] - args_.query_starts[sequence]) * (args_.num_heads / args_.num_kv_heads);
  }

  // Whether tiles of tile_rows_ rows will do.
  bool divide() {
    first_[0] = 0;
    for (int64_t s = 0; s < args_.num_sequences; ++s) first_[s + 1] = first_[s] + ceil_div(rows(s), tile_rows_);
    return tile_rows_ == kFewestTileRows || count() >= 4 * num_threads();
  }

  const AttentionArgs& args_;
  int64_t* first_;
  int64_t tile_rows_;
};

// Few tiles, long contexts: every (tile, split) is a task of its own, then every tile merges its splits, in index order
// as always.
template <class T, class Stored>
void attend_wide(const AttentionArgs& args, const Tiles& tiles, int64_t num_splits) {
  constexpr int64_t kHeader = 16;  // max, sum, whether the row sees the split; padded to keep outputs aligned
  const int64_t stride = kHeader + RowTile<T, Stored>::output_width(args), tile_rows = tiles.tile_rows();
  float* partials = new float[static_cast<size_t>(tiles.count() * num_splits * tile_rows * stride)];
  const auto place = [&](int64_t tile, int64_t split, int64_t r) {
    return partials + ((tile * num_splits + split) * tile_rows + r) * stride;
  };
  parallel_for(tiles.count() * num_splits, [&](int64_t task) {
    const int64_t index = task / num_splits, split = task % num_splits;
    for (int64_t r = 0; r < tile_rows; ++r) place(index, split, r)[2] = 0.0f;
    RowTile<T, Stored> tile(args, tiles.at(index));
    if (split < tile.first_split() || split >= tile.end_split()) return;
    const size_t num_words = RowTile<T, Stored>::scratch_words(args, tile_rows);
    tile.prepare(static_cast<int32_t*>(thread_scratch(num_words * sizeof(int32_t))));
    tile.attend(split, [&](int64_t first_row, int count, const Row* rows) {
      for (int r = 0; r < count; ++r) {
        const Partial& partial = rows[r].partial;
        float* to = place(index, split, first_row + r);
        to[0] = partial.max;
        to[1] = partial.sum;
        to[2] = 1.0f;
        __builtin_memcpy(to + kHeader, partial.output, static_cast<size_t>(stride - kHeader) * sizeof(float));
      }
    });
  });
  parallel_for(tiles.count(), [&](int64_t index) {
    const RowTile<T, Stored> tile(args, tiles.at(index));
    for (int64_t r = 0; r < tiles.at(index).num_rows; ++r) {
      Partial merged = {0.0f, 0.0f, static_cast<float*>(thread_scratch(static_cast<size_t>(stride) * sizeof(float)))};
      bool first = true;
      for (int64_t split = 0; split < num_splits; ++split) {
        float* from = place(index, split, r);
        if (from[2] == 0.0f) continue;
        Row row = {};
        row.partial = {from[0], from[1], from + kHeader};
        merge_rows(&merged, &row, 1, &first, args.value_dim);
        first = false;
      }
      tile.store_output(r, merged);
    }
  });
  delete[] partials;
}

template <class T, class Stored>
void attend(const AttentionArgs& args) {
  const Tiles tiles(args);
  if (tiles.count() == 0) return;
  const int64_t num_splits = ceil_div(tiles.longest_context(), kSplitKeys);
  const int64_t num_partials = tiles.count() * num_splits * tiles.tile_rows();
  const int64_t partial_bytes = num_partials * (16 + RowTile<T, Stored>::output_width(args)) * 4;
  if (num_splits > 1 && tiles.count() < 2 * num_threads() && num_threads() > 1 && partial_bytes <= kMaxPartialBytes) {
    return attend_wide<T, Stored>(args, tiles, num_splits);
  }
  // Late tiles of a prompt see the most keys: they go first, so that no thread is left with one at the end.
  parallel_for(tiles.count(), [&](int64_t task) { attend_tile<T, Stored>(args, tiles.at(tiles.count() - 1 - task)); });
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
