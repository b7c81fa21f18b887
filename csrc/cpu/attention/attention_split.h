// Attention of some query rows to one split of the keys. The arithmetic of this unit never changes.
//
// Keys are cut into splits of 512 anchored at absolute position. One query row meets one split in a fixed order. First
// come the scores, each a sum over the head's width from its start, and their maximum. Then come the weights, which are
// exp(score - maximum), as bf16 if pairs of bf16 are multiplied, and the weighted sum of the values, key after key.
// Splits merge in index order. Rows share loads of keys and values, never arithmetic: the result of a row does not
// depend on the rows beside it. attention_amx.h has the same for AMX, whose sums have another order.
#pragma once

#include "attention/attention_args.h"
#include "attention/kv_split.h"
#include "simd/vec_math.h"

namespace shardline::SHARDLINE_ISA {

// How many rows share each load of keys and values: as many as fill the registers with sums, or all rows of a
// tile that has a few more, so that nothing is loaded twice.
constexpr int kBestRows = 6, kMaxRows = 8;
// The most rows that meet a split together. They take turns with each group of panels.
constexpr int kMostBlockRows = 64;

// The result of one query row for one split, or for all splits merged so far.
struct Partial {
  float max;
  float sum;
  float* output;  // [value_width], not yet divided by sum
};

struct Row {
  const int32_t* query;  // [key_words]
  int32_t* scores;       // fp32 [kSplitKeys]; the weights [words_of(kSplitKeys)] replace them, and stay in L1
  Range keys;            // those visible in this split
  Partial partial;
};

// How keys and values are read: as words, also with a request for later ones, or with some hidden; or as bytes, which
// become words in registers.
enum class Read { kPlain, kFetched, kMasked, kDecoded };

// How many vectors a tile of `rows` sums in registers. AVX-512 has 32 registers, other ISAs have 16.
constexpr int tile_vectors(int rows, Read how) {
  if (how == Read::kDecoded) return rows <= 3 ? 4 : 2;  // six registers hold the tables and masks
  if (rows == 8) return kLanes == 16 ? 2 : 1;
  return kLanes == 16 || rows <= 3 ? 4 : (rows == 7 ? 1 : 2);
}

// Multiplies sums of products with keys by the keys' scales.
template <int kRows, int kVectors, class Split>
inline void scale_scores(F32 (&sum)[kRows][kVectors], const Split& split, int64_t first) {
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const F32 scales = split.key_scales(first + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sum[r][v] = sum[r][v] * scales;
  }
}

// Computes the scores of kRows rows for kVectors vectors of keys, from the split's key `first` on. If it fetches, it
// asks for one later line of the cache per line of keys, so that memory never waits for the products.
template <class W, int kRows, int kVectors, Read kHow, class Split>
void score_vectors(const Row* rows, Split& split, int64_t first) {
  constexpr bool kDecodes = kHow == Read::kDecoded;
  constexpr int kLineWords = kDecodes ? 2 : 1;  // of one key
  constexpr int64_t kWordBytes = kPanelTokens * 4 / kLineWords;
  const char* keys[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const int64_t key = first + v * kLanes;
    if constexpr (kDecodes) {
      keys[v] = reinterpret_cast<const char*>(split.key_bytes(key / kPanelTokens));
    } else {
      keys[v] = reinterpret_cast<const char*>(split.keys(key));
    }
  }
  const BytePairs pairs = split.byte_pairs();
  F32 sum[kRows][kVectors] = {};
  const int64_t num_words = split.key_words();
  int64_t word = 0;
  // One later panel after the other is fetched: the addresses of all would take too many registers.
  constexpr int kParts = Split::kScaledLatents ? 2 : kHow == Read::kPlain ? 1 : kVectors;
  for (int part = 0; part < kParts; ++part) {
    FetchAhead ahead = {};
    if constexpr (kHow != Read::kPlain) ahead = split.after_keys((first + part * kLanes) / kPanelTokens);
    const bool ends_scaled = Split::kScaledLatents && part == 0;
    for (const int64_t end = ends_scaled ? split.scaled_words() : num_words * (part + 1) / kParts; word < end;
         word += kLineWords) {
      if constexpr (kHow != Read::kPlain) ahead.template fetch<(kRows > 2 && Split::kFetchesToL1), kVectors>();
      I32 key[kVectors][kLineWords];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const char* line = keys[v] + word * kWordBytes;
        if constexpr (kDecodes) {
          pairs.decode(line, key[v][0], key[v][1]);
        } else {
          key[v][0] = load_words(line);
        }
      }
#pragma GCC unroll 2
      for (int w = 0; w < kLineWords; ++w) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const I32 query = broadcast_int(rows[r].query[word + w]);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) sum[r][v] = multiply_words<W>(sum[r][v], query, key[v][w]);
        }
      }
    }
    if constexpr (Split::kScaled) {
      if (word == split.scaled_words()) scale_scores<kRows, kVectors>(sum, split, first);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store_words(rows[r].scores + first + v * kLanes, (I32)sum[r][v]);
  }
}

// The same for the keys [first, end) of whole vectors.
template <class W, int kRows, Read kHow, int kVectors = tile_vectors(kRows, kHow), class Split>
void score_keys(const Row* rows, Split& split, int64_t first, int64_t end) {
  for (; first + kVectors * kLanes <= end; first += kVectors * kLanes) {
    score_vectors<W, kRows, kVectors, kHow>(rows, split, first);
  }
  if constexpr (kVectors > 1) score_keys<W, kRows, kHow, kVectors / 2>(rows, split, first, end);
}

inline F32 load_score(const int32_t* p) { return (F32)load_words(p); }

// The visible keys, and enough hidden keys to fill pairs of vectors.
inline Range padded(Range keys) {
  constexpr int64_t kStep = 2 * kLanes;
  return {keys.begin / kStep * kStep, ceil_div(keys.end, kStep) * kStep};
}

// Gives hidden keys among kLanes scores the lowest score.
inline void hide(int32_t* scores, int64_t first_key, Range visible) {
  const F32 lowest = broadcast(-__builtin_inff());
  const I32 key = lane_numbers(AllLanes{}) + static_cast<int32_t>(first_key);
  F32 score = load_score(scores + first_key);
  score = key < static_cast<int32_t>(visible.end) ? score : lowest;
  score = key >= static_cast<int32_t>(visible.begin) ? score : lowest;
  store_words(scores + first_key, (I32)score);
}

// Finds the maximum of a row's scores, after the softcap and the scale; hidden keys get the lowest score.
template <class W>
void find_maximum(Row& row, const AttentionArgs& args) {
  const float lowest = -__builtin_inff();
  const Range keys = padded(row.keys);
  if (args.softcap != 0.0f) {
    for (int64_t i = keys.begin; i < keys.end; i += kLanes) {
      const F32 capped = tanh(load_score(row.scores + i) * args.scale / args.softcap) * args.softcap;
      store_words(row.scores + i, (I32)capped);
    }
  }
  for (int64_t i = keys.begin; i < row.keys.begin; i += kLanes) hide(row.scores, i, row.keys);
  for (int64_t i = row.keys.end / kLanes * kLanes; i < keys.end; i += kLanes) hide(row.scores, i, row.keys);
  F32 largest[2] = {broadcast(lowest), broadcast(lowest)};
  for (int64_t i = keys.begin; i < keys.end; i += 2 * kLanes) {
    for (int v = 0; v < 2; ++v) largest[v] = maximum(load_score(row.scores + i + v * kLanes), largest[v]);
  }
  row.partial.max = max_lanes(maximum(largest[0], largest[1])) * (args.softcap != 0.0f ? 1.0f : args.scale);
}

// Weights times the scales of their values. A hidden key has a weight of zero, and its scale may be anything.
template <class Split>
inline F32 scaled_weights(F32 weights, const Split& split, int64_t place) {
  if constexpr (Split::kScaled) return weights == 0.0f ? F32{} : weights * split.value_scales(place);
  return weights;
}

// Turns a row's scores into weights and their sum. If pairs are multiplied, the sum is that of the rounded weights,
// which multiply the values, so that the weights add up to one. Weights with scales are summed without the scales.
template <class W, class Split>
void weigh_scores(Row& row, const Split& split, const AttentionArgs& args) {
  const Range keys = padded(row.keys);
  const float scale = args.softcap != 0.0f ? 1.0f : args.scale;
  const float max = row.partial.max == -__builtin_inff() ? 0.0f : row.partial.max;
  F32 sum = {};
  if constexpr (kPerWord<W> == 2) {
#if defined(__AVX512BF16__)
    constexpr float kLog2e = 1.44269504f;
    const F32 factor = broadcast(scale * kLog2e), shift = broadcast(max * -kLog2e);
    const auto weigh = [&](F32 sum, int64_t i) {
      const F32 first = exp2_coarse(fma(load_score(row.scores + i), factor, shift));
      const F32 second = exp2_coarse(fma(load_score(row.scores + i + kLanes), factor, shift));
      const I32 pairs = rounded_pairs(scaled_weights(first, split, i), scaled_weights(second, split, i + kLanes));
      store_words(row.scores + (i >> 1), pairs);
      if constexpr (Split::kScaled) {
        return sum + (first + second);
      } else {
        return dot_pairs(sum, pairs, broadcast_int(0x3f803f80));  // ones
      }
    };
    F32 other_sum = {};
    int64_t i = keys.begin;
    for (; i + 4 * kLanes <= keys.end; i += 4 * kLanes) {
      sum = weigh(sum, i);
      other_sum = weigh(other_sum, i + 2 * kLanes);
    }
    if (i < keys.end) sum = weigh(sum, i);
    sum = sum + other_sum;
#endif
  } else {
    for (int64_t i = keys.begin; i < keys.end; i += kLanes) {
      const F32 weight = exp(fma(load_score(row.scores + i), broadcast(scale), broadcast(-max)));
      store_words(row.scores + i, (I32)scaled_weights(weight, split, i));
      sum = sum + weight;
    }
  }
  row.partial.sum = sum_lanes(sum);
}

// Adds weights * values of the split's words [begin, end) to the outputs of kRows rows, over kVectors vectors of
// columns, or, if kVectors is 0, over the last columns that fill no vector. `visible` masks the halves of the values'
// pairs. Hidden values must be masked: a weight of zero would turn an infinite value of a later token into NaN.
template <class W, int kRows, int kVectors, Read kHow, class Split>
void add_columns(Row* rows, Split& split, int64_t column, Range words, I32 visible) {
  constexpr bool kDecodes = kHow == Read::kDecoded;
  constexpr int kLoads = kVectors > 0 ? kVectors : 1, kLineVectors = kDecodes ? 2 : 1;
  constexpr int64_t kPanelWords = kPanelTokens / kPerWord<W>, kWordBytes = 4 / kLineVectors;
  const int64_t left = split.value_dim() - column, stride = split.value_stride(), offset = split.value_offset(column);
  const BytePairs pairs = split.byte_pairs();
  F32 sum[kRows][kLoads];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kLoads; ++v) sum[r][v] = load(rows[r].partial.output + column + v * kLanes);
  }
  for (int64_t word = words.begin; word < words.end;) {
    const int64_t panel = word / kPanelWords, end = min64(words.end, (panel + 1) * kPanelWords);
    const char* values;
    if constexpr (kDecodes) {
      values = reinterpret_cast<const char*>(split.value_bytes(panel));
    } else {
      values = reinterpret_cast<const char*>(split.values(panel));
    }
    FetchAhead ahead = {};
    if constexpr (kHow == Read::kFetched || kDecodes) ahead = split.after_values(panel);
    for (int64_t at = word % kPanelWords * stride + offset; word < end; ++word, at += stride) {
      I32 value[kLoads];
#pragma GCC unroll 4
      for (int v = 0; v < kLoads; v += kLineVectors) {
        const int64_t place = (at + v * kLanes) * kWordBytes;
        if constexpr (kHow == Read::kFetched || kDecodes) ahead.template fetch_at<(kRows > 2)>(place);
        if constexpr (kDecodes) {
          pairs.decode(values + place, value[v], value[v + 1]);
        } else {
          value[v] = kVectors > 0 ? load_words(values + place) : load_words_n(values + place, left);
        }
        if constexpr (kHow == Read::kMasked) value[v] &= visible;
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const I32 weight = broadcast_int(rows[r].scores[word]);
#pragma GCC unroll 4
        for (int v = 0; v < kLoads; ++v) sum[r][v] = multiply_words<W>(sum[r][v], weight, value[v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kLoads; ++v) store(rows[r].partial.output + column + v * kLanes, sum[r][v]);
  }
}

// The same over all columns from `column` on.
template <class W, int kRows, Read kHow, int kVectors = tile_vectors(kRows, kHow), class Split>
void add_words(Row* rows, Split& split, Range words, int64_t column = 0, I32 visible = I32{}) {
  const int64_t dim = split.value_dim();
  for (; column + kVectors * kLanes <= dim; column += kVectors * kLanes) {
    add_columns<W, kRows, kVectors, kHow>(rows, split, column, words, visible);
  }
  if constexpr (kVectors > (kHow == Read::kDecoded ? 2 : 1)) {
    add_words<W, kRows, kHow, kVectors / 2>(rows, split, words, column, visible);
  } else if constexpr (kHow != Read::kDecoded) {  // which fills all vectors
    if (column < dim) add_columns<W, kRows, 0, kHow>(rows, split, column, words, visible);
  }
}

// Adds the values of those words that one row sees.
template <class W, class Split>
void add_visible_values(Row& row, Split& split, Range words) {
  for (; words.begin < words.end; ++words.begin) {
    uint32_t visible = 0xffffffffu;
    if constexpr (kPerWord<W> == 2) {
      if (words.begin * 2 < row.keys.begin) visible &= 0xffff0000u;
      if (words.begin * 2 + 2 > row.keys.end) visible &= 0x0000ffffu;
    }
    const I32 mask = broadcast_int(static_cast<int32_t>(visible));
    split.hold_values({words.begin, words.begin + 1});
    add_words<W, 1, Read::kMasked>(&row, split, {words.begin, words.begin + 1}, 0, mask);
  }
}

template <int kCount>
struct Count {
  static constexpr int value = kCount;
};

// Calls body(part, Count<n>) for the n <= kMaxRows rows of each part.
template <int kRows = kMaxRows, class Body>
void for_part(Row* part, int num_rows, const Body& body) {
  if (num_rows == kRows) return body(part, Count<kRows>{});
  if constexpr (kRows > 1) for_part<kRows - 1>(part, num_rows, body);
}
template <class Body>
void for_parts(Row* rows, int num_rows, const Body& body) {
  const int num_parts = num_rows <= kMaxRows ? 1 : (num_rows + kBestRows - 1) / kBestRows;
  for (int part = 0; part < num_parts; ++part) {  // evenly: 9 rows are 4 + 5, not 6 + 3
    const int first = num_rows * part / num_parts;
    for_part(rows + first, num_rows * (part + 1) / num_parts - first, body);
  }
}

// Computes one split for up to kMostBlockRows rows, each of which sees a part of it, and fills each row's partial. This
// is also the unit that context parallelism distributes.
template <class W, class Split>
void attend_split(Row* rows, int num_rows, Split& split, const AttentionArgs& args) {
  constexpr int64_t kGroupKeys = Split::kGroupPanels * kPanelTokens, kGroupWords = kGroupKeys / kPerWord<W>;
  Range any = rows[0].keys, all = rows[0].keys;
  for (int r = 1; r < num_rows; ++r) {
    any = {min64(any.begin, rows[r].keys.begin), max64(any.end, rows[r].keys.end)};
    all = {max64(all.begin, rows[r].keys.begin), min64(all.end, rows[r].keys.end)};
  }
  const int64_t end_key = ceil_div(any.end, kLanes) * kLanes;
  const int64_t step = num_rows <= kMaxRows ? kSplitKeys : kGroupKeys;
  for (int64_t key = any.begin / kLanes * kLanes, stop; key < end_key; key = stop) {
    stop = min64(end_key, (key / step + 1) * step);
    for_parts(rows, num_rows, [&](Row* part, auto count) {
      constexpr int kRows = decltype(count)::value;
      if constexpr (Split::kDecodesBytes) {
        if (split.decodes_bytes()) return score_keys<W, kRows, Read::kDecoded>(part, split, key, stop);
      } else if constexpr (Split::kHoldsKeys) {  // other keys are fetched when they become words
        if (split.pass_once() && part == rows) return score_keys<W, kRows, Read::kFetched>(part, split, key, stop);
      }
      score_keys<W, kRows, Read::kPlain>(part, split, key, stop);
    });
  }
  for (int r = 0; r < num_rows; ++r) find_maximum<W>(rows[r], args);
  for (int r = 0; r < num_rows; ++r) {
    weigh_scores<W>(rows[r], split, args);
    for (int64_t d = 0; d < split.value_dim(); d += kLanes) store(rows[r].partial.output + d, F32{});
  }
  const auto words_seen = [](const Row& row) { return Range{row.keys.begin / kPerWord<W>, words_of<W>(row.keys.end)}; };
  Range whole = {words_of<W>(all.begin), all.end / kPerWord<W>};  // words that every row sees in full
  if (whole.empty()) {
    for (int r = 0; r < num_rows; ++r) add_visible_values<W>(rows[r], split, words_seen(rows[r]));
    return;
  }
  for (int r = 0; r < num_rows; ++r) add_visible_values<W>(rows[r], split, {words_seen(rows[r]).begin, whole.begin});
  // Panels that become words do so in groups. Others pass at once, so that sums stay in registers.
  const bool makes_words = !Split::kHoldsValues && !split.decodes_bytes();
  const int64_t group_words = makes_words ? kGroupWords : words_of<W>(kSplitKeys);
  for (const int64_t end = whole.end; whole.begin < end; whole.begin = whole.end) {
    whole.end = min64(end, (whole.begin / group_words + 1) * group_words);
    if (makes_words) split.hold_values(whole);
    for_parts(rows, num_rows, [&](Row* part, auto count) {
      constexpr int kRows = decltype(count)::value;
      if constexpr (Split::kDecodesBytes) {
        if (split.decodes_bytes()) return add_words<W, kRows, Read::kDecoded>(part, split, whole);
      } else if constexpr (Split::kHoldsValues) {
        if (split.pass_once() && part == rows) return add_words<W, kRows, Read::kFetched>(part, split, whole);
      }
      add_words<W, kRows, Read::kPlain>(part, split, whole);
    });
  }
  for (int r = 0; r < num_rows; ++r) add_visible_values<W>(rows[r], split, {whole.end, words_seen(rows[r]).end});
}

// Merges a row's partial of the next split into those before; `shrink` is exp(-|difference of the maxima|).
inline void merge(Partial& merged, const Partial& next, F32 shrink, int64_t dim) {
  const bool higher = next.max > merged.max;
  const F32 keep = higher ? shrink : broadcast(1.0f), take = higher ? broadcast(1.0f) : shrink;
  merged.sum = fma(broadcast(merged.sum), keep, broadcast(next.sum) * take)[0];
  merged.max = higher ? next.max : merged.max;
  for (int64_t i = 0; i < dim; i += kLanes) {
    store(merged.output + i, fma(load(merged.output + i), keep, load(next.output + i) * take));
  }
}

// The same for up to kMostBlockRows rows that meet one split together. A row marked `first` has nothing merged yet.
inline void merge_rows(Partial* merged, const Row* rows, int num_rows, const bool* first, int64_t dim) {
  float differences[kMostBlockRows] = {};
  for (int r = 0; r < num_rows; ++r) {
    const float next = rows[r].partial.max;
    if (!first[r]) differences[r] = next > merged[r].max ? merged[r].max - next : next - merged[r].max;
  }
  for (int r = 0; r < num_rows; r += kLanes) store(differences + r, exp(load(differences + r)));
  for (int r = 0; r < num_rows; ++r) {
    const Partial& next = rows[r].partial;
    if (!first[r]) {
      merge(merged[r], next, broadcast(differences[r]), dim);
      continue;
    }
    merged[r].max = next.max;
    merged[r].sum = next.sum;
    for (int64_t i = 0; i < dim; i += kLanes) store(merged[r].output + i, load(next.output + i));
  }
}

// Stores the result of a row: its weighted sum of values over its sum of weights, which a sink's weight joins.
template <class T>
inline void store_mean(T* out, const Partial& merged, const float* sink, int64_t dim) {
  float sum = merged.sum;
  if (sink != nullptr) sum += exp(broadcast(*sink - merged.max))[0];
  const F32 factor = broadcast(1.0f / sum);
  for (int64_t d = 0; d < dim; d += kLanes) store_n(out + d, load(merged.output + d) * factor, dim - d);
}

}  // namespace shardline::SHARDLINE_ISA
