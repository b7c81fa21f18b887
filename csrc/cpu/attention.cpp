// Causal attention over a paged KV cache, for prefill and decode alike: which rows meet which splits, and where.
#include "attention_split.h"
#include "thread_pool.h"
#include "variant.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int kTileRows = 32;  // rows that pass over a split together while it is in L2
constexpr int64_t kMaxPartialBytes = 64 << 20;

// Up to kTileRows query rows of one sequence that share a KV head.
struct TileIndex {
  int64_t sequence, kv_head, first_row;
  int num_rows;
};

// Row r of a sequence's rows for one KV head is token r / group, head r % group.
template <class T>
class RowTile {
 public:
  RowTile(const AttentionArgs& args, const TileIndex& index)
      : args_(args),
        index_(index),
        group_(args.num_heads / args.num_kv_heads),
        first_token_(args.query_starts[index.sequence]),
        first_position_(args.context_lens[index.sequence] - (args.query_starts[index.sequence + 1] - first_token_)) {}

  static size_t scratch_bytes(const AttentionArgs& args) {
    return static_cast<size_t>(kTileRows * query_width(args)) * sizeof(Query) +
           static_cast<size_t>(kMaxRows * (kScoreWidth + output_width(args))) * 4 + sizeof(Split<T>);
  }

  static int64_t output_width(const AttentionArgs& args) { return ceil_div(args.value_dim, 16) * 16; }

  // Takes scratch_bytes() of memory, 64-byte aligned, and returns what follows them.
  char* prepare(char* memory) {
    queries_ = reinterpret_cast<Query*>(memory);
    float* floats = reinterpret_cast<float*>(queries_ + kTileRows * query_width(args_));
    for (int r = 0; r < kMaxRows; ++r) {
      rows_[r].scores = floats;
      rows_[r].partial.output = floats + kScoreWidth;
      floats += kScoreWidth + output_width(args_);
    }
    split_ = reinterpret_cast<Split<T>*>(floats);
    for (int r = 0; r < index_.num_rows; ++r) load_query(r);
    return reinterpret_cast<char*>(split_ + 1);
  }

  int64_t first_split() const { return visible(0).begin / kSplitKeys; }
  int64_t end_split() const { return ceil_div(visible(index_.num_rows - 1).end, kSplitKeys); }

  // Calls take(row, partial) for every row that sees something of the split.
  template <class Take>
  void attend(int64_t split, const Take& take) {
    find_keys(split * kSplitKeys);
    int r = 0;
    for (; r + 4 <= index_.num_rows; r += 4) attend_rows<4>(r, split * kSplitKeys, take);
    for (; r + 2 <= index_.num_rows; r += 2) attend_rows<2>(r, split * kSplitKeys, take);
    if (r < index_.num_rows) attend_rows<1>(r, split * kSplitKeys, take);
  }

  void store_output(int r, const Partial& merged) const {
    T* out = static_cast<T*>(args_.out) + ((first_token_ + token(r)) * args_.num_heads + head(r)) * args_.value_dim;
    for (int64_t d = 0; d < args_.value_dim; d += kLanes) {
      store_n(out + d, load(merged.output + d) / merged.sum, args_.value_dim - d);
    }
  }

 private:
  using Query = typename QueryType<T>::Type;
  static constexpr int kMaxRows = kMaxSplitRows;
  static constexpr int64_t kScoreWidth = kSplitKeys + 16;  // a tile of scores may end past the split

  static int64_t query_width(const AttentionArgs& args) { return ceil_div(args.key_dim, 32) * 32; }

  int64_t token(int r) const { return (index_.first_row + r) / group_; }
  int64_t head(int r) const { return index_.kv_head * group_ + (index_.first_row + r) % group_; }

  Range visible(int r) const {
    const int64_t position = first_position_ + token(r);
    return {args_.window > 0 ? max64(0, position - args_.window + 1) : 0, position + 1};
  }

  void load_query(int r) {
    const T* from = static_cast<const T*>(args_.query) + (first_token_ + token(r)) * args_.query_stride +
                    head(r) * args_.key_dim;
    Query* to = queries_ + r * query_width(args_);
    __builtin_memset(to, 0, static_cast<size_t>(query_width(args_)) * sizeof(Query));
    if constexpr (sizeof(Query) == sizeof(T)) {
      __builtin_memcpy(to, from, static_cast<size_t>(args_.key_dim) * sizeof(T));
    } else {
      for (int64_t d = 0; d < args_.key_dim; ++d) to[d] = to_float(from[d]);
    }
  }

  // Only blocks that some row sees are looked up: those before the window may be freed already.
  void find_keys(int64_t split_begin) {
    split_->cold = true;
    const int64_t begin = max64(split_begin, visible(0).begin);
    const int64_t end = min64(split_begin + kSplitKeys, visible(index_.num_rows - 1).end);
    const int32_t* block_table = args_.block_tables + index_.sequence * args_.block_table_stride;
    for (int64_t position = begin; position < end;) {
      const int64_t block = block_table[position / args_.block_size];
      const int64_t block_end = min64(end, (position / args_.block_size + 1) * args_.block_size);
      const int64_t head = block * args_.num_kv_heads + index_.kv_head;
      const int64_t slot = head * args_.block_size + position % args_.block_size;
      const T* key = static_cast<const T*>(args_.key_cache) + slot * args_.key_dim;
      const T* value = static_cast<const T*>(args_.value_cache) + slot * args_.value_dim;
      for (; position < block_end; ++position, key += args_.key_dim, value += args_.value_dim) {
        split_->keys[position - split_begin] = key;
        split_->values[position - split_begin] = value;
      }
    }
  }

  template <int kRows, class Take>
  void attend_rows(int first, int64_t split_begin, const Take& take) {
    bool all_see = true;
    for (int r = 0; r < kRows; ++r) {
      const Range range = visible(first + r);
      rows_[r].query = queries_ + (first + r) * query_width(args_);
      rows_[r].keys = {max64(0, range.begin - split_begin), min64(kSplitKeys, range.end - split_begin)};
      all_see = all_see && !rows_[r].keys.empty();
    }
    if (all_see) {
      attend_split<T, kRows>(rows_, *split_, args_);
      split_->cold = false;
      for (int r = 0; r < kRows; ++r) take(first + r, rows_[r].partial);
    } else if constexpr (kRows > 1) {
      for (int r = 0; r < kRows; ++r) attend_rows<1>(first + r, split_begin, take);
    }
  }

  const AttentionArgs& args_;
  const TileIndex index_;
  const int64_t group_, first_token_, first_position_;
  Query* queries_ = nullptr;
  Split<T>* split_ = nullptr;
  Row<T> rows_[kMaxRows];
};

// All splits of a tile, one after another.
template <class T>
void attend_tile(const AttentionArgs& args, const TileIndex& index) {
  const int64_t width = RowTile<T>::output_width(args);
  RowTile<T> tile(args, index);
  char* memory = static_cast<char*>(
      thread_scratch(RowTile<T>::scratch_bytes(args) + static_cast<size_t>(kTileRows * width) * sizeof(float)));
  float* outputs = reinterpret_cast<float*>(tile.prepare(memory));
  Partial merged[kTileRows];
  bool started[kTileRows] = {};
  for (int64_t split = tile.first_split(); split < tile.end_split(); ++split) {
    tile.attend(split, [&](int r, const Partial& partial) {
      merged[r].output = outputs + r * width;
      merge(merged[r], partial, !started[r], args.value_dim);
      started[r] = true;
    });
  }
  for (int r = 0; r < index.num_rows; ++r) tile.store_output(r, merged[r]);
}

// The tiles of a call, counted over sequences, then rows, then KV heads.
class Tiles {
 public:
  explicit Tiles(const AttentionArgs& args) : args_(args), first_(new int64_t[args.num_sequences + 1]) {
    first_[0] = 0;
    for (int64_t s = 0; s < args.num_sequences; ++s) first_[s + 1] = first_[s] + ceil_div(rows(s), kTileRows);
  }
  ~Tiles() { delete[] first_; }
  Tiles(const Tiles&) = delete;

  int64_t count() const { return first_[args_.num_sequences] * args_.num_kv_heads; }

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
    const int64_t first_row = (place - first_[low]) * kTileRows;
    return {low, tile % args_.num_kv_heads, first_row, static_cast<int>(min64(kTileRows, rows(low) - first_row))};
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

  const AttentionArgs& args_;
  int64_t* first_;
};

// Few tiles, long contexts: every (tile, split) is a task of its own, then every tile merges its splits, in index order
// as always.
template <class T>
void attend_wide(const AttentionArgs& args, const Tiles& tiles, int64_t num_splits) {
  constexpr int64_t kHeader = 16;  // max, sum, whether the row sees the split; padded to keep outputs aligned
  const int64_t stride = kHeader + RowTile<T>::output_width(args);
  float* partials = new float[static_cast<size_t>(tiles.count() * num_splits * kTileRows * stride)];
  const auto place = [&](int64_t tile, int64_t split, int r) {
    return partials + ((tile * num_splits + split) * kTileRows + r) * stride;
  };
  parallel_for(tiles.count() * num_splits, [&](int64_t task) {
    const int64_t index = task / num_splits, split = task % num_splits;
    for (int r = 0; r < kTileRows; ++r) place(index, split, r)[2] = 0.0f;
    RowTile<T> tile(args, tiles.at(index));
    if (split < tile.first_split() || split >= tile.end_split()) return;
    tile.prepare(static_cast<char*>(thread_scratch(RowTile<T>::scratch_bytes(args))));
    tile.attend(split, [&](int r, const Partial& partial) {
      float* to = place(index, split, r);
      to[0] = partial.max;
      to[1] = partial.sum;
      to[2] = 1.0f;
      __builtin_memcpy(to + kHeader, partial.output, static_cast<size_t>(stride - kHeader) * sizeof(float));
    });
  });
  parallel_for(tiles.count(), [&](int64_t index) {
    const RowTile<T> tile(args, tiles.at(index));
    for (int r = 0; r < tiles.at(index).num_rows; ++r) {
      Partial merged = {0.0f, 0.0f, static_cast<float*>(thread_scratch(static_cast<size_t>(stride) * sizeof(float)))};
      bool started = false;
      for (int64_t split = 0; split < num_splits; ++split) {
        float* from = place(index, split, r);
        if (from[2] == 0.0f) continue;
        merge(merged, {from[0], from[1], from + kHeader}, !started, args.value_dim);
        started = true;
      }
      tile.store_output(r, merged);
    }
  });
  delete[] partials;
}

template <class T>
void attend(const AttentionArgs& args) {
  const Tiles tiles(args);
  if (tiles.count() == 0) return;
  const int64_t num_splits = ceil_div(tiles.longest_context(), kSplitKeys);
  const int64_t partial_bytes = tiles.count() * num_splits * kTileRows * (16 + RowTile<T>::output_width(args)) * 4;
  if (num_splits > 1 && tiles.count() < 2 * num_threads() && num_threads() > 1 && partial_bytes <= kMaxPartialBytes) {
    return attend_wide<T>(args, tiles, num_splits);
  }
  // Late tiles of a prompt see the most keys: they go first, so that no thread is left with one at the end.
  parallel_for(tiles.count(), [&](int64_t task) { attend_tile<T>(args, tiles.at(tiles.count() - 1 - task)); });
}

}  // namespace

void paged_attention(const AttentionArgs& args) {
  args.dtype == DType::kFloat32 ? attend<float>(args) : attend<bf16>(args);
}

}  // namespace shardline::SHARDLINE_ISA
