// Causal attention over a paged KV cache, for prefill and decode alike.
//
// Keys are cut into splits of 512 anchored at absolute position. One query row meets one split in a fixed order (scores,
// then their maximum, then weights and the weighted sum of values, key after key), and splits merge in index order. Rows
// share loads of keys and values, never arithmetic, so a row does not notice which rows are computed beside it.
#include "thread_pool.h"
#include "variant.h"
#include "vec_math.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int64_t kSplitKeys = 512;
constexpr int kTaskRows = 32;  // rows that pass over a split together while it is in L2
constexpr int kMaxTileRows = 8;  // rows that share each load of a value

// Queries are held as fp32, or as bf16 where the ISA multiplies pairs of it.
template <class T>
struct QueryType {
  using Type = float;
  static constexpr int kChunk = kLanes;
};
#if defined(__AVX512BF16__)
template <>
struct QueryType<bf16> {
  using Type = bf16;
  static constexpr int kChunk = 2 * kLanes;
};
#endif

template <class T>
inline F32 dot_chunk(F32 sum, const float* q, const T* k) {
  return fma(load(q), load(k), sum);
}
inline F32 dot_chunk(F32 sum, const bf16* q, const bf16* k) { return dot_pairs(sum, load_pairs(q), load_pairs(k)); }

// One step of summing the lanes of many vectors at once: the two halves of every segment of a, then of b, are added.
template <int kSegment, int... kLane>
inline F32 fold_segments(F32 a, F32 b, Lanes<kLane...>) {
  constexpr int kHalf = kSegment / 2;
  const F32 low = __builtin_shufflevector(a, b, (kLane / kHalf * kSegment + kLane % kHalf)...);
  const F32 high = __builtin_shufflevector(a, b, (kLane / kHalf * kSegment + kLane % kHalf + kHalf)...);
  return low + high;
}

// Lane i of the result is sum_lanes(sums[i]).
template <int kSegment = kLanes>
inline F32 sum_each(F32 (&sums)[kSegment]) {
  if constexpr (kSegment == 1) {
    return sums[0];
  } else {
    F32 folded[kSegment / 2];
#pragma GCC unroll 8
    for (int i = 0; i < kSegment / 2; ++i) folded[i] = fold_segments<kSegment>(sums[2 * i], sums[2 * i + 1], AllLanes{});
    return sum_each<kSegment / 2>(folded);
  }
}

// The keys of one split that anybody here can see, relative to its first position.
template <class T>
struct Split {
  const T* keys[kSplitKeys];
  const T* values[kSplitKeys];
};

struct Range {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

// One query row's share of a split, and also of all splits merged so far.
struct Partial {
  float max;
  float sum;
  float* output;  // [value_dim], not yet divided by sum
};

template <class T>
struct Row {
  const typename QueryType<T>::Type* query;
  float* scores;  // [kSplitKeys + kLanes]
  Range keys;     // visible in this split
  Partial partial;
};

// Scores of kRows rows against the keys in `keys`; a tile of kRows x (kLanes / kRows) dot products at a time.
template <class T, int kRows>
void score_keys(const Row<T>* rows, const Split<T>& split, Range keys, int64_t dim) {
  constexpr int kKeys = kLanes / kRows;
  constexpr int kChunk = QueryType<T>::kChunk;
  const int64_t whole = dim / kChunk * kChunk;
  for (int64_t begin = keys.begin; begin < keys.end; begin += kKeys) {
    const T* key[kKeys];
    for (int j = 0; j < kKeys; ++j) key[j] = split.keys[min64(begin + j, keys.end - 1)];
    F32 sums[kLanes] = {};
    for (int64_t d = 0; d < whole; d += kChunk) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        sums[i] = dot_chunk(sums[i], rows[i / kKeys].query + d, key[i % kKeys] + d);
      }
    }
    if (whole < dim) {
#pragma GCC unroll 16
      for (int j = 0; j < kKeys; ++j) {
        alignas(64) T padded[kChunk] = {};  // queries are padded already
        __builtin_memcpy(padded, key[j] + whole, static_cast<size_t>(dim - whole) * sizeof(T));
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          F32& sum = sums[r * kKeys + j];
          sum = dot_chunk(sum, rows[r].query + whole, padded);
        }
      }
    }
    float scores[kLanes];
    store(scores, sum_each(sums));
    for (int r = 0; r < kRows; ++r) __builtin_memcpy(rows[r].scores + begin, scores + r * kKeys, kKeys * sizeof(float));
  }
}

// Turns a row's scores into weights exp(score - max), and their sum. Lane i holds keys i, i + kLanes, ... of the split.
template <class T>
void weigh_scores(Row<T>& row, float scale, float softcap) {
  const float lowest = -__builtin_inff();
  const int64_t first = row.keys.begin / kLanes * kLanes;
  I32 lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  F32 largest = broadcast(lowest);
  for (int64_t i = first; i < row.keys.end; i += kLanes) {
    F32 score = load(row.scores + i) * scale;
    if (softcap != 0.0f) score = tanh(score / softcap) * softcap;
    const I32 key = lane + static_cast<int32_t>(i);
    const I32 visible = (key >= static_cast<int32_t>(row.keys.begin)) & (key < static_cast<int32_t>(row.keys.end));
    score = visible ? score : broadcast(lowest);
    store(row.scores + i, score);
    largest = maximum(score, largest);
  }
  row.partial.max = max_lanes(largest);
  const float shift = row.partial.max == lowest ? 0.0f : row.partial.max;
  F32 sum = {};
  for (int64_t i = first; i < row.keys.end; i += kLanes) {
    const F32 weight = exp(load(row.scores + i) - shift);
    store(row.scores + i, weight);
    sum = sum + weight;
  }
  row.partial.sum = sum_lanes(sum);
}

// Adds weight * value to the outputs of kRows rows, over columns [column, column + kVectors * kLanes).
template <class T, int kRows, int kVectors>
inline void add_value_columns(Row<T>* rows, const Split<T>& split, Range keys, int64_t column, int64_t count) {
  F32 sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[r][v] = load(rows[r].partial.output + column + v * kLanes);
  }
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    F32 value[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const T* p = split.values[j] + column + v * kLanes;
      value[v] = kVectors == 1 ? load_n(p, count) : load(p);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F32 weight = broadcast(rows[r].scores[j]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] = fma(weight, value[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(rows[r].partial.output + column + v * kLanes, sum[r][v]);
  }
}

// How many vectors of columns a tile of `rows` sums in registers.
constexpr int value_vectors(int rows) {
  if (rows == 8) return kLanes == 16 ? 2 : 1;
  return rows == 4 && kLanes != 16 ? 2 : 4;
}

template <class T, int kRows>
void add_values(Row<T>* rows, const Split<T>& split, Range keys, int64_t dim) {
  constexpr int kVectors = value_vectors(kRows);
  if (keys.empty()) return;
  int64_t column = 0;
  for (; column + kVectors * kLanes <= dim; column += kVectors * kLanes) {
    add_value_columns<T, kRows, kVectors>(rows, split, keys, column, kLanes);
  }
  for (; column < dim; column += kLanes) {
    add_value_columns<T, kRows, 1>(rows, split, keys, column, dim - column);
  }
}

// One split for kRows rows: fills each row's partial. This is also the unit that context parallelism hands out.
template <class T, int kRows>
void attend_split(Row<T>* rows, const Split<T>& split, const AttentionArgs& args) {
  Range any = rows[0].keys, all = rows[0].keys;
  for (int r = 1; r < kRows; ++r) {
    any = {min64(any.begin, rows[r].keys.begin), max64(any.end, rows[r].keys.end)};
    all = {max64(all.begin, rows[r].keys.begin), min64(all.end, rows[r].keys.end)};
  }
  constexpr int kScoreRows = kRows < 4 ? kRows : 4;
  for (int r = 0; r < kRows; r += kScoreRows) score_keys<T, kScoreRows>(rows + r, split, any, args.key_dim);
  for (int r = 0; r < kRows; ++r) {
    weigh_scores(rows[r], args.scale, args.softcap);
    __builtin_memset(rows[r].partial.output, 0, static_cast<size_t>(ceil_div(args.value_dim, kLanes) * kLanes) * 4);
  }
  if (all.empty()) {
    for (int r = 0; r < kRows; ++r) add_values<T, 1>(rows + r, split, rows[r].keys, args.value_dim);
    return;
  }
  // Keys that only some rows see (the window's edge, the causal edge) are added row by row: a weight of zero would not
  // do, since it turns an infinite value of a later token into NaN.
  for (int r = 0; r < kRows; ++r) add_values<T, 1>(rows + r, split, {rows[r].keys.begin, all.begin}, args.value_dim);
  add_values<T, kRows>(rows, split, all, args.value_dim);
  for (int r = 0; r < kRows; ++r) add_values<T, 1>(rows + r, split, {all.end, rows[r].keys.end}, args.value_dim);
}

// Folds the next split into what was merged so far.
void merge(Partial& merged, const Partial& next, bool first, int64_t dim) {
  const float largest = first || next.max > merged.max ? next.max : merged.max;
  const F32 keep = first ? F32{} : exp(broadcast(merged.max - largest));
  const F32 take = first ? broadcast(1.0f) : exp(broadcast(next.max - largest));
  merged.sum = first ? next.sum : fma(broadcast(merged.sum), keep, broadcast(next.sum) * take)[0];
  merged.max = largest;
  for (int64_t i = 0; i < dim; i += kLanes) {
    const F32 output = load(next.output + i);
    store(merged.output + i, first ? output : fma(load(merged.output + i), keep, output * take));
  }
}

// Up to kTaskRows query rows of one sequence that share a KV head; row r is token r / group, head r % group.
template <class T>
class Task {
 public:
  Task(const AttentionArgs& args, int64_t sequence, int64_t kv_head, int64_t first_row, int num_rows)
      : args_(args),
        kv_head_(kv_head),
        first_row_(first_row),
        num_rows_(num_rows),
        group_(args.num_heads / args.num_kv_heads),
        first_token_(args.query_starts[sequence]),
        first_position_(args.context_lens[sequence] - (args.query_starts[sequence + 1] - first_token_)),
        block_table_(args.block_tables + sequence * args.block_table_stride),
        key_width_(ceil_div(args.key_dim, 64) * 64),
        value_width_(ceil_div(args.value_dim, 64) * 64) {
    constexpr int64_t kScoreWidth = kSplitKeys + 64;
    const int64_t query_bytes = kTaskRows * key_width_ * static_cast<int64_t>(sizeof(Query));
    const int64_t output_floats = (kTaskRows + kMaxTileRows) * value_width_;
    char* memory = static_cast<char*>(thread_scratch(static_cast<size_t>(
        query_bytes + (output_floats + kMaxTileRows * kScoreWidth) * 4 + static_cast<int64_t>(sizeof(Split<T>)))));
    queries_ = reinterpret_cast<Query*>(memory);
    outputs_ = reinterpret_cast<float*>(memory + query_bytes);
    float* scores = outputs_ + output_floats;
    split_ = reinterpret_cast<Split<T>*>(scores + kMaxTileRows * kScoreWidth);
    for (int r = 0; r < kMaxTileRows; ++r) {
      tile_[r].scores = scores + r * kScoreWidth;
      tile_[r].partial.output = outputs_ + (kTaskRows + r) * value_width_;
    }
  }

  void run() {
    for (int r = 0; r < num_rows_; ++r) load_query(r);
    const int64_t begin = visible(0).begin / kSplitKeys * kSplitKeys;
    const int64_t end = visible(num_rows_ - 1).end;
    for (int64_t split_begin = begin; split_begin < end; split_begin += kSplitKeys) {
      find_keys(split_begin);
      int r = 0;
      for (; r + 8 <= num_rows_; r += 8) attend_tile<8>(r, split_begin);
      for (; r + 4 <= num_rows_; r += 4) attend_tile<4>(r, split_begin);
      for (; r + 2 <= num_rows_; r += 2) attend_tile<2>(r, split_begin);
      if (r < num_rows_) attend_tile<1>(r, split_begin);
    }
    for (int r = 0; r < num_rows_; ++r) store_output(r);
  }

 private:
  using Query = typename QueryType<T>::Type;

  int64_t token(int r) const { return (first_row_ + r) / group_; }
  int64_t head(int r) const { return kv_head_ * group_ + (first_row_ + r) % group_; }

  Range visible(int r) const {
    const int64_t position = first_position_ + token(r);
    return {args_.window > 0 ? max64(0, position - args_.window + 1) : 0, position + 1};
  }

  void load_query(int r) {
    const T* from = static_cast<const T*>(args_.query) + (first_token_ + token(r)) * args_.query_stride +
                    head(r) * args_.key_dim;
    Query* to = queries_ + r * key_width_;
    __builtin_memset(to, 0, static_cast<size_t>(key_width_) * sizeof(Query));
    if constexpr (sizeof(Query) == sizeof(T)) {
      __builtin_memcpy(to, from, static_cast<size_t>(args_.key_dim) * sizeof(T));
    } else {
      for (int64_t d = 0; d < args_.key_dim; ++d) to[d] = to_float(from[d]);
    }
  }

  // Only blocks that some row sees are looked up: those before the window may be freed already.
  void find_keys(int64_t split_begin) {
    const int64_t begin = max64(split_begin, visible(0).begin);
    const int64_t end = min64(split_begin + kSplitKeys, visible(num_rows_ - 1).end);
    for (int64_t position = begin; position < end;) {
      const int64_t block = block_table_[position / args_.block_size];
      const int64_t block_end = min64(end, (position / args_.block_size + 1) * args_.block_size);
      const int64_t slot = (block * args_.num_kv_heads + kv_head_) * args_.block_size + position % args_.block_size;
      const T* key = static_cast<const T*>(args_.key_cache) + slot * args_.key_dim;
      const T* value = static_cast<const T*>(args_.value_cache) + slot * args_.value_dim;
      for (; position < block_end; ++position, key += args_.key_dim, value += args_.value_dim) {
        split_->keys[position - split_begin] = key;
        split_->values[position - split_begin] = value;
      }
    }
  }

  template <int kRows>
  void attend_tile(int first, int64_t split_begin) {
    bool any = false;
    for (int r = 0; r < kRows; ++r) {
      const Range range = visible(first + r);
      tile_[r].query = queries_ + (first + r) * key_width_;
      tile_[r].keys = {max64(0, range.begin - split_begin), min64(kSplitKeys, range.end - split_begin)};
      any = any || !tile_[r].keys.empty();
    }
    if (!any) return;
    if constexpr (kRows > 1) {
      for (int r = 0; r < kRows; ++r) {
        if (!tile_[r].keys.empty()) continue;
        for (int alone = 0; alone < kRows; ++alone) attend_tile<1>(first + alone, split_begin);
        return;
      }
    }
    attend_split<T, kRows>(tile_, *split_, args_);
    for (int r = 0; r < kRows; ++r) {
      Partial& merged = merged_[first + r];
      merged.output = outputs_ + (first + r) * value_width_;
      merge(merged, tile_[r].partial, !started_[first + r], args_.value_dim);
      started_[first + r] = true;
    }
  }

  void store_output(int r) {
    T* out = static_cast<T*>(args_.out) + ((first_token_ + token(r)) * args_.num_heads + head(r)) * args_.value_dim;
    for (int64_t d = 0; d < args_.value_dim; d += kLanes) {
      store_n(out + d, load(merged_[r].output + d) / merged_[r].sum, args_.value_dim - d);
    }
  }

  const AttentionArgs& args_;
  const int64_t kv_head_, first_row_;
  const int num_rows_;
  const int64_t group_, first_token_, first_position_;
  const int32_t* block_table_;
  const int64_t key_width_, value_width_;
  Query* queries_;
  float* outputs_;
  Split<T>* split_;
  Row<T> tile_[kMaxTileRows];
  Partial merged_[kTaskRows];
  bool started_[kTaskRows] = {};
};

template <class T>
void attend(const AttentionArgs& args) {
  const int64_t group = args.num_heads / args.num_kv_heads;
  // first_task[s]: how many row tiles come before sequence s.
  int64_t* first_tile = new int64_t[static_cast<size_t>(args.num_sequences + 1)];
  first_tile[0] = 0;
  for (int64_t s = 0; s < args.num_sequences; ++s) {
    const int64_t rows = (args.query_starts[s + 1] - args.query_starts[s]) * group;
    first_tile[s + 1] = first_tile[s] + ceil_div(rows, kTaskRows);
  }
  const int64_t num_tiles = first_tile[args.num_sequences];
  // Late tiles of a prompt see the most keys: they go first, so that no thread is left with one at the end.
  parallel_for(num_tiles * args.num_kv_heads, [&](int64_t task) {
    const int64_t tile = num_tiles - 1 - task / args.num_kv_heads;
    int64_t low = 0, high = args.num_sequences - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (first_tile[middle] <= tile) low = middle; else high = middle - 1;
    }
    const int64_t first_row = (tile - first_tile[low]) * kTaskRows;
    const int64_t rows = (args.query_starts[low + 1] - args.query_starts[low]) * group;
    const int num_rows = static_cast<int>(min64(kTaskRows, rows - first_row));
    Task<T>(args, low, task % args.num_kv_heads, first_row, num_rows).run();
  });
  delete[] first_tile;
}

}  // namespace

void paged_attention(const AttentionArgs& args) {
  args.dtype == DType::kFloat32 ? attend<float>(args) : attend<bf16>(args);
}

}  // namespace shardline::SHARDLINE_ISA
