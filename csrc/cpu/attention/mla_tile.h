// One tile of latent attention: rows of one sequence meet its keys, split by split. The arithmetic of this unit never
// changes.
//
// As in attention.cpp, keys are cut into splits of 512 anchored at absolute position, and splits are merged in index
// order. The arithmetic of a lane does not depend on the rows beside it: scores are summed over the dims in order, and
// outputs over the split's keys in order. If the cache is bf16, words are pairs on every ISA, and weights are rounded
// to bf16 before they are summed and multiplied by the values.
//
// Scores read the panels of kv_pages.h as they lie. A panel holds pairs of dims, and values need pairs of tokens, which
// takes one shuffle of each vector.
#pragma once

#include "attention/attention_args.h"
#include "attention/attention_operands.h"
#include "attention/tile_tasks.h"
#include "simd/transpose.h"
#include "simd/vec_math.h"

namespace shardline::SHARDLINE_ISA {

constexpr int64_t kValueDims = 16;   // dims of a block of values
constexpr int64_t kValuePanels = 8;  // panels whose values become words at a time, so that they stay in L2
constexpr int kMlaTileVectors = 4;  // of rows in a tile
constexpr int64_t kMlaTileRows = kMlaTileVectors * kLanes;

// Sums of a register tile. The registers must hold these, the operands of one side and one operand of the other.
constexpr int kSums = kLanes == 16 ? 16 : 8;
constexpr int broadcasts(int vectors) { return vectors == 3 ? kSums / 4 : kSums / vectors; }

// A tile's result for one split, or for all splits merged so far.
struct MlaPartial {
  float* max;     // [kMlaTileRows]
  float* sum;     // [kMlaTileRows]
  float* output;  // [dims padded to panels][lanes of the tile], not yet divided by the sums
};

// Cuts a thread's scratch memory into the arrays that a tile needs. The caller owns the memory.
class ScratchMemory {
 public:
  explicit ScratchMemory(char* memory) : next_(memory) {}
  template <class V>
  V* take(int64_t count) {
    V* taken = reinterpret_cast<V*>(next_);
    next_ += ceil_div(count * static_cast<int64_t>(sizeof(V)), 64) * 64;
    return taken;
  }
  MlaPartial take_partial(int64_t output_size) {
    return {take<float>(kMlaTileRows), take<float>(kMlaTileRows), take<float>(output_size)};
  }

 private:
  char* next_;
};

// kLanes pairs of floats that are bf16 exactly.
inline I32 join_pairs(F32 first, F32 second) { return (I32)(((U32)first >> 16) | (U32)second); }

template <class T>
class MlaTile {
 public:
  MlaTile(const MlaAttentionArgs& args, const TileIndex& index)
      : args_(args),
        index_(index),
        vectors_(static_cast<int>(ceil_div(index.num_rows, kLanes))),
        first_token_(args.query_starts[index.sequence]),
        words_(ceil_div(args.latent_dim + args.rope_dim, kPerWord<T>)) {}

  static int64_t padded_dims(const MlaAttentionArgs& args) {
    return ceil_div(args.latent_dim, kValueDims) * kValueDims;
  }
  static int64_t output_size(const MlaAttentionArgs& args) { return padded_dims(args) * kMlaTileRows; }
  static size_t scratch_bytes(const MlaAttentionArgs& args) {
    const int64_t words = (kLanes + kMlaTileRows) * query_words(args) + (2 * kSplitKeys + kSums) * kMlaTileRows +
                          value_words(args) + 2 * output_size(args) + 4 * kMlaTileRows;
    return static_cast<size_t>(words) * 4 + 16 * 64;
  }

  // Takes the memory that attend() needs, and packs the queries.
  void prepare(ScratchMemory& memory) {
    queries_ = memory.take<int32_t>(kMlaTileRows * query_words(args_));
    scores_ = memory.take<float>((kSplitKeys + kSums) * kMlaTileRows);
    weights_ = memory.take<int32_t>(kSplitKeys * kMlaTileRows);
    values_ = memory.take<int32_t>(value_words(args_));
    int32_t* rows = memory.take<int32_t>(kLanes * query_words(args_));
    for (int v = 0; v < vectors_; ++v) pack_queries(v, rows);
  }

  int64_t end_split() const { return ceil_div(visible_end(index_.num_rows - 1), kSplitKeys); }

  void attend(int64_t split, MlaPartial& partial) {
    switch (vectors_) {
      case 1: return attend_split<1>(split, partial);
      case 2: return attend_split<2>(split, partial);
      case 3: return attend_split<3>(split, partial);
      default: return attend_split<4>(split, partial);
    }
  }

  // Merges the next split, from split 1 on, into the ones before. Every row sees split 0, so merging begins with it.
  void merge(MlaPartial& merged, const MlaPartial& next, int64_t split) const {
    const int64_t dims = padded_dims(args_), width = vectors_ * kLanes;
    for (int v = 0; v < vectors_; ++v) {
      const int64_t lane = v * kLanes;
      const F32 next_max = load(next.max + lane), next_sum = load(next.sum + lane);
      const I32 sees = ends(split, v) > 0;
      const F32 merged_max = load(merged.max + lane), merged_sum = load(merged.sum + lane);
      const F32 largest = maximum(next_max, merged_max);
      const F32 keep = exp(merged_max - largest), take = exp(next_max - largest);
      store(merged.max + lane, sees ? largest : merged_max);
      store(merged.sum + lane, sees ? fma(merged_sum, keep, next_sum * take) : merged_sum);
      for (int64_t d = 0; d < dims; ++d) {
        float* place = merged.output + d * width + lane;
        const F32 before = load(place);
        store(place, sees ? fma(before, keep, load(next.output + d * width + lane) * take) : before);
      }
    }
  }

  void store_output(const MlaPartial& merged) const {
    const int64_t dims = padded_dims(args_), width = vectors_ * kLanes;
    for (int v = 0; v < vectors_; ++v) {
      const int64_t rows = min64(kLanes, index_.num_rows - v * kLanes);
      const F32 sum = load(merged.sum + v * kLanes);
      for (int64_t d = 0; d < dims && d < args_.latent_dim; d += kLanes) {
        I32 block[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) block[i] = (I32)(load(merged.output + (d + i) * width + v * kLanes) / sum);
        transpose(block);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t row = v * kLanes + r;
          T* out = static_cast<T*>(args_.out) + (token(row) * args_.num_heads + head(row)) * args_.latent_dim;
          store_n(out + d, (F32)block[r], args_.latent_dim - d);
        }
      }
    }
  }

 private:
  // Words of a query or key, made a multiple of the lanes.
  static int64_t query_words(const MlaAttentionArgs& args) {
    return ceil_div(ceil_div(args.latent_dim + args.rope_dim, kPerWord<T>), kLanes) * kLanes;
  }

  // Words of the values of kValuePanels panels: [blocks of dims][panels][kBlockWords].
  static constexpr int64_t kBlockWords = kValueDims * kPanelTokens / kPerWord<T>;
  static int64_t value_words(const MlaAttentionArgs& args) {
    return padded_dims(args) / kValueDims * kValuePanels * kBlockWords;
  }
  // The place of dim d among the words of a block that belong to its first tokens, kPerWord<T> of them. The words of
  // the next tokens follow at a distance of kPerWord<T>.
  static constexpr int64_t value_place(int64_t d) { return d / kPerWord<T> * kPanelTokens + d % kPerWord<T>; }
  // The distance of those words from the block's beginning, for word `word` of the tokens.
  static int64_t value_offset(int64_t word) {
    constexpr int64_t kPanelWords = kPanelTokens / kPerWord<T>;
    return word / kPanelWords * kBlockWords + word % kPanelWords * kPerWord<T>;
  }

  int64_t token(int64_t row) const { return first_token_ + (index_.first_row + row) / args_.num_heads; }
  int64_t head(int64_t row) const { return (index_.first_row + row) % args_.num_heads; }
  int64_t visible_end(int64_t row) const { return index_.first_position + token(row) - first_token_ + 1; }

  // How many keys of a split each row of vector v sees. Lanes without a row see as many as the last row.
  I32 ends(int64_t split, int v) const {
    I32 lanes;
    for (int i = 0; i < kLanes; ++i) {
      const int64_t end = visible_end(min64(v * kLanes + i, index_.num_rows - 1)) - split * kSplitKeys;
      lanes[i] = static_cast<int32_t>(max64(0, min64(kSplitKeys, end)));
    }
    return lanes;
  }

  // Rows of vector v as [word][row]; lanes without a row get zeros.
  void pack_queries(int v, int32_t* rows) {
    const int64_t words = query_words(args_), width = vectors_ * kLanes;
    __builtin_memset(rows, 0, static_cast<size_t>(kLanes * words) * 4);
    for (int64_t i = 0; i < kLanes && v * kLanes + i < index_.num_rows; ++i) {
      const int64_t row = v * kLanes + i;
      T* to = reinterpret_cast<T*>(rows + i * words);
      const T* latent = static_cast<const T*>(args_.query_latent) + token(row) * args_.query_latent_stride;
      const T* rope = static_cast<const T*>(args_.query_rope) + token(row) * args_.query_rope_stride;
      __builtin_memcpy(to, latent + head(row) * args_.latent_dim, static_cast<size_t>(args_.latent_dim) * sizeof(T));
      __builtin_memcpy(to + args_.latent_dim, rope + head(row) * args_.query_rope_head_stride,
                       static_cast<size_t>(args_.rope_dim) * sizeof(T));
    }
    for (int64_t word = 0; word < words; word += kLanes) {
      I32 block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) block[i] = load_words(rows + i * words + word);
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store_words(queries_ + (word + i) * width + v * kLanes, block[i]);
    }
  }

  void find_panels(int64_t split, int64_t num_keys) {
    const int64_t dims = args_.latent_dim + args_.rope_dim;
    const int32_t* block_table = args_.block_tables + index_.sequence * args_.block_table_stride;
    for (int64_t panel = 0; panel * kPanelTokens < num_keys; ++panel) {
      const int64_t position = split * kSplitKeys + panel * kPanelTokens, block = position / args_.block_size;
      const int64_t slot = block_table[block] * args_.block_size + position % args_.block_size;
      panels_[panel] = reinterpret_cast<const int32_t*>(static_cast<const T*>(args_.cache) + slot * dims);
    }
  }

  template <int kVectors>
  void attend_split(int64_t split, MlaPartial& partial) {
    I32 end[kVectors];
    int64_t least = kSplitKeys, most = 0;
    for (int v = 0; v < kVectors; ++v) {
      end[v] = ends(split, v);
      least = min64(least, end[v][0]);
      most = max64(most, end[v][kLanes - 1]);
    }
    find_panels(split, most);
    const int64_t num_panels = ceil_div(most, kPanelTokens);
    for (int64_t panel = 0; panel < num_panels; ++panel) {
      const int32_t* ahead = panels_[min64(panel + 1, num_panels - 1)];
      const int64_t stop = min64(kPanelTokens, most - panel * kPanelTokens);
      for (int64_t j = 0; j < stop; j += broadcasts(kVectors)) score_keys<kVectors>(panel, j, ahead);
    }
    for (int v = 0; v < kVectors; ++v) weigh_scores<kVectors>(v, end[v], most, partial);
    // First the words of keys that all rows see, then those that only some rows see. A hidden key must not be added
    // with a weight of zero: that would turn an infinite value of a later token into NaN.
    const int64_t num_words = ceil_div(most, kPerWord<T>);
    const int64_t common = least == most ? num_words : least / kPerWord<T>;
    constexpr int64_t kStep = kValuePanels * kPanelTokens / kPerWord<T>;
    for (int64_t first = 0; first < num_words; first += kStep) {
      const int64_t last = min64(num_words, first + kStep);
      for (int64_t panel = 0; panel * kPanelTokens < (last - first) * kPerWord<T>; ++panel) {
        prepare_values(first * kPerWord<T> / kPanelTokens + panel, panel, most);
      }
      add_values<kVectors>(first, last, common, end, partial.output);
    }
  }

  // Computes the scores, not yet scaled, of the keys of a panel from `offset` on, as many as registers allow. The first
  // call for a panel fetches the one `ahead`.
  template <int kVectors>
  void score_keys(int64_t panel, int64_t offset, const int32_t* ahead) {
    constexpr int kKeys = broadcasts(kVectors);
    F32 sums[kKeys][kVectors] = {};
    const int32_t* query = queries_;
    const int32_t* key = panels_[panel] + offset;
    if (offset > 0) ahead = key;
    for (int64_t word = 0; word < words_; ++word) {
      __builtin_prefetch(ahead, 0, kToL2);
      I32 column[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) column[v] = load_words(query + v * kLanes);
#pragma GCC unroll 16
      for (int j = 0; j < kKeys; ++j) {
        const I32 dim = broadcast_int(key[j]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[j][v] = multiply_words<T>(sums[j][v], dim, column[v]);
      }
      query += kVectors * kLanes;
      key += kPanelTokens;
      ahead += kPanelTokens;
    }
    const int64_t first = panel * kPanelTokens + offset;
#pragma GCC unroll 16
    for (int j = 0; j < kKeys; ++j) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store(scores_ + ((first + j) * kVectors + v) * kLanes, sums[j][v]);
    }
  }

  // Turns the scores of vector v into weights exp(score - max), as words of keys, and stores their maxima and sums.
  template <int kVectors>
  void weigh_scores(int v, I32 end, int64_t num_keys, MlaPartial& partial) {
    const F32 lowest = broadcast(-__builtin_inff());
    F32 largest = lowest;
    for (int64_t key = 0; key < num_keys; ++key) {
      float* place = scores_ + (key * kVectors + v) * kLanes;
      const F32 score = end > static_cast<int32_t>(key) ? load(place) * args_.scale : lowest;
      store(place, score);
      largest = maximum(score, largest);
    }
    const F32 shift = largest == lowest ? F32{} : largest;
    F32 sum = {};
    const auto weight = [&](int64_t key) {
      if (key >= num_keys) return F32{};
      const F32 rounded = rounded_to<T>(exp(load(scores_ + (key * kVectors + v) * kLanes) - shift));
      sum = sum + rounded;
      return rounded;
    };
    for (int64_t word = 0; word * kPerWord<T> < num_keys; ++word) {
      I32 packed = (I32)weight(word * kPerWord<T>);
      if constexpr (kPerWord<T> == 2) packed = join_pairs((F32)packed, weight(word * 2 + 1));
      store_words(weights_ + (word * kVectors + v) * kLanes, packed);
    }
    store(partial.max + v * kLanes, largest);
    store(partial.sum + v * kLanes, sum);
  }

  // Turns the latents of a panel into words of values, at `place` of the panels that pass together. Tokens from
  // `num_keys` on count as zeros.
  void prepare_values(int64_t panel, int64_t place, int64_t num_keys) {
    const int64_t row_dims = args_.latent_dim + args_.rope_dim, num_seen = num_keys - panel * kPanelTokens;
    for (int64_t dim = 0; dim < args_.latent_dim; dim += kValueDims) {
      int32_t* to = values_ + (dim / kValueDims * kValuePanels + place) * kBlockWords;
      const int32_t* from = panels_[panel] + dim / kPerWord<T> * kPanelTokens;
      const int64_t count = min64(kValueDims, row_dims - dim) / kPerWord<T> * kPanelTokens;
      for (int64_t i = 0; i < count; i += kLanes) {
        I32 words = load_words(from + i);
        if (num_seen < kPanelTokens) words = lane_numbers(AllLanes{}) < seen_lanes(num_seen, i) ? words : I32{};
        store_words(to + i, swap_halves(words));
      }
    }
  }

  // How many of the lanes of a vector at word i of a panel are tokens among the first num_seen.
  static I32 seen_lanes(int64_t num_seen, int64_t i) {
    return broadcast_int(static_cast<int32_t>(num_seen - i % kPanelTokens));
  }

  // Two elements of two neighbouring tokens become two tokens of two neighbouring elements.
  static I32 swap_halves(I32 words) {
    if constexpr (kPerWord<T> == 1) return words;
    typedef uint64_t U64 __attribute__((vector_size(kLanes * 4)));
    const U64 pairs = (U64)words;
    return (I32)((pairs & 0xffff00000000ffffu) | (pairs << 16 & 0x0000ffff00000000u) | (pairs >> 16 & 0xffff0000u));
  }

  template <int kVectors>
  void add_values(int64_t first, int64_t last, int64_t common, const I32 (&end)[kVectors], float* output) {
    constexpr int kDims = broadcasts(kVectors);
    for (int64_t dim = 0; dim < args_.latent_dim; dim += kDims) {
      const int32_t* block = values_ + dim / kValueDims * kValuePanels * kBlockWords + value_place(dim % kValueDims);
      F32 sums[kDims][kVectors];
#pragma GCC unroll 16
      for (int d = 0; d < kDims; ++d) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          sums[d][v] = first == 0 ? F32{} : load(output + ((dim + d) * kVectors + v) * kLanes);
        }
      }
      for (int64_t word = first; word < min64(last, common); ++word) {
        const int32_t* value = block + value_offset(word - first);
        I32 weight[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) weight[v] = load_words(weights_ + (word * kVectors + v) * kLanes);
#pragma GCC unroll 16
        for (int d = 0; d < kDims; ++d) {
          const I32 broadcasted = broadcast_int(value[value_place(d)]);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) sums[d][v] = multiply_words<T>(sums[d][v], broadcasted, weight[v]);
        }
      }
      for (int64_t word = max64(first, common); word < last; ++word) {
        add_seen<kDims, kVectors>(block + value_offset(word - first), word, end, sums);
      }
#pragma GCC unroll 16
      for (int d = 0; d < kDims; ++d) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) store(output + ((dim + d) * kVectors + v) * kLanes, sums[d][v]);
      }
    }
  }

  // Adds one word of keys in the lanes that see it. Some lanes may see only the first key of a pair.
  template <int kDims, int kVectors>
  void add_seen(const int32_t* value, int64_t word, const I32 (&end)[kVectors], F32 (&sums)[kDims][kVectors]) const {
    const int32_t key = static_cast<int32_t>(word * kPerWord<T>);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const I32 weight = load_words(weights_ + (word * kVectors + v) * kLanes);
      const I32 all = end[v] >= key + static_cast<int32_t>(kPerWord<T>), first = end[v] == key + 1;
#pragma GCC unroll 16
      for (int d = 0; d < kDims; ++d) {
        const F32 sum = sums[d][v];
        const F32 with_all = multiply_words<T>(sum, broadcast_int(value[value_place(d)]), weight);
        F32 other = sum;
        if constexpr (kPerWord<T> == 2) {
          other = first ? multiply_words<T>(sum, broadcast_int(value[value_place(d)] & 0xffff), weight) : sum;
        }
        sums[d][v] = all ? with_all : other;
      }
    }
  }

  const MlaAttentionArgs& args_;
  const TileIndex index_;  // row r is token r / num_heads, head r % num_heads
  const int vectors_;
  const int64_t first_token_;
  const int64_t words_;         // of a query or key
  int32_t* queries_ = nullptr;  // [words][rows]
  float* scores_ = nullptr;     // [kSplitKeys + kSums][rows]
  int32_t* weights_ = nullptr;  // [words of keys][rows]
  int32_t* values_ = nullptr;   // see value_words
  const int32_t* panels_[kSplitPanels];  // of the split
};

}  // namespace shardline::SHARDLINE_ISA
