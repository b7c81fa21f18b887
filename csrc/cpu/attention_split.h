// Attention of a few query rows to one split of the keys: the unit whose arithmetic never changes.
//
// Keys are cut into splits of 512 anchored at absolute position. One query row meets one split in a fixed order
// (scores, then their maximum, then weights and the weighted sum of values, key after key), and splits merge in index
// order. Rows share loads of keys and values, never arithmetic, so a row does not notice which rows are beside it.
#pragma once

#include "kernels.h"
#include "vec_math.h"

namespace shardline::SHARDLINE_ISA {

constexpr int64_t kSplitKeys = 512;
constexpr int kMaxSplitRows = 4;  // rows that share each load of a key or value

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
    for (int i = 0; i < kSegment / 2; ++i) {
      folded[i] = fold_segments<kSegment>(sums[2 * i], sums[2 * i + 1], AllLanes{});
    }
    return sum_each<kSegment / 2>(folded);
  }
}

// The keys of one split that anybody here can see, relative to its first position.
template <class T>
struct Split {
  const T* keys[kSplitKeys];
  const T* values[kSplitKeys];
  bool cold;  // not read yet: blocks lie anywhere in memory, so the hardware cannot guess which comes next
};

constexpr int64_t kPrefetchKeys = 32;  // two blocks ahead

template <class T>
inline void prefetch(const T* row, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + d);
}

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
    for (int64_t j = begin + kPrefetchKeys; split.cold && j < min64(begin + kPrefetchKeys + kKeys, keys.end); ++j) {
      prefetch(split.keys[j], dim);
    }
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
inline void add_value_columns(Row<T>* rows, const Split<T>& split, Range keys, int64_t column, int64_t dim) {
  F32 sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[r][v] = load(rows[r].partial.output + column + v * kLanes);
  }
  const bool cold = split.cold && column == 0;
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    if (cold && j + kPrefetchKeys < keys.end) prefetch(split.values[j + kPrefetchKeys], dim);
    F32 value[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const T* p = split.values[j] + column + v * kLanes;
      value[v] = kVectors == 1 ? load_n(p, dim - column) : load(p);
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
  return rows == 4 && kLanes != 16 ? 2 : 4;
}

template <class T, int kRows>
void add_values(Row<T>* rows, const Split<T>& split, Range keys, int64_t dim) {
  constexpr int kVectors = value_vectors(kRows);
  if (keys.empty()) return;
  int64_t column = 0;
  for (; column + kVectors * kLanes <= dim; column += kVectors * kLanes) {
    add_value_columns<T, kRows, kVectors>(rows, split, keys, column, dim);
  }
  for (; column < dim; column += kLanes) {
    add_value_columns<T, kRows, 1>(rows, split, keys, column, dim);
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
  score_keys<T, kRows>(rows, split, any, args.key_dim);
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
inline void merge(Partial& merged, const Partial& next, bool first, int64_t dim) {
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

}  // namespace shardline::SHARDLINE_ISA
