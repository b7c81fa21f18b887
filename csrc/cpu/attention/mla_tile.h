// One tile of latent attention: rows of one sequence against its keys, split by split. The unit whose arithmetic never
// changes.
//
// As in attention.cpp, keys are cut into splits of 512 anchored at absolute position and merged in index order. The
// arithmetic of a lane is the same whichever rows are beside it: scores add over the dims in order, outputs over the
// split's keys in order. For bf16 caches, weights are rounded to bf16 before they are added up and meet the values.
#pragma once

#include "dispatch/kernels.h"
#include "simd/transpose.h"
#include "simd/vec_math.h"

namespace shardline::SHARDLINE_ISA::mla {

constexpr int64_t kSplitKeys = 512;
constexpr int64_t kPackedKeys = 128;  // whose values are packed at a time, so that they stay in L2
constexpr int64_t kPanelDims = 16;
constexpr int64_t kPanelStride = (kPackedKeys + 1) * kPanelDims;  // no power of two: panels would share cache sets
constexpr int kMaxVectors = 4;  // of rows in a tile
constexpr int64_t kMaxRows = kMaxVectors * kLanes;

// Sums of a register tile: these, the operands of one side and one of the other must fit the registers.
constexpr int kSums = kLanes == 16 ? 16 : 8;
constexpr int broadcasts(int vectors) { return vectors == 3 ? kSums / 4 : kSums / vectors; }

// Everything is multiplied in words of four bytes: one float, or a pair of bf16 whose products are added together.
template <class T>
constexpr int64_t kPerWord = 4 / static_cast<int64_t>(sizeof(T));

template <class T>
inline F32 multiply_add(F32 sum, I32 a, I32 b) {
  if constexpr (sizeof(T) == 4) {
    return fma((F32)a, (F32)b, sum);
  } else {
    return dot_pairs(sum, a, b);
  }
}

inline I32 load_words(const void* p) {
  I32 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline void store_words(int32_t* p, I32 v) { __builtin_memcpy(p, &v, sizeof v); }

// Up to kMaxRows rows of one sequence: row r is token r / num_heads, head r % num_heads.
struct TileIndex {
  int64_t sequence, first_row;
  int num_rows;
};

// A tile's share of a split, and also of all splits merged so far.
struct Partial {
  float* max;     // [kMaxRows]
  float* sum;     // [kMaxRows]
  float* output;  // [dims padded to panels][lanes of the tile], not yet divided by the sums
};

// The caller owns the memory: what one thread needs for a tile, cut out of its scratch.
class Memory {
 public:
  explicit Memory(char* memory) : next_(memory) {}
  template <class V>
  V* take(int64_t count) {
    V* taken = reinterpret_cast<V*>(next_);
    next_ += ceil_div(count * static_cast<int64_t>(sizeof(V)), 64) * 64;
    return taken;
  }
  Partial take_partial(int64_t output_size) {
    return {take<float>(kMaxRows), take<float>(kMaxRows), take<float>(output_size)};
  }

 private:
  char* next_;
};

template <class T>
class Tile {
 public:
  Tile(const MlaAttentionArgs& args, const TileIndex& index)
      : args_(args),
        index_(index),
        vectors_(static_cast<int>(ceil_div(index.num_rows, kLanes))),
        first_token_(args.query_starts[index.sequence]),
        first_position_(args.context_lens[index.sequence] - (args.query_starts[index.sequence + 1] - first_token_)),
        words_(ceil_div(args.latent_dim + args.rope_dim, kPerWord<T>)) {}

  static int64_t padded_dims(const MlaAttentionArgs& args) {
    return ceil_div(args.latent_dim, kPanelDims) * kPanelDims;
  }
  static int64_t output_size(const MlaAttentionArgs& args) { return padded_dims(args) * kMaxRows; }
  static size_t scratch_bytes(const MlaAttentionArgs& args) {
    const int64_t words = (2 * kLanes + kMaxRows) * query_words(args) + (2 * kSplitKeys + kSums) * kMaxRows +
                          kPanelStride * padded_dims(args) / kPanelDims + 2 * output_size(args) + 4 * kMaxRows;
    return static_cast<size_t>(words) * 4 + kSplitKeys * sizeof(T*) + 16 * 64;
  }

  // Takes what attend() needs, and packs the queries.
  void prepare(Memory& memory) {
    queries_ = memory.take<int32_t>(kMaxRows * query_words(args_));
    packed_keys_ = memory.take<int32_t>(kLanes * query_words(args_));
    scores_ = memory.take<float>((kSplitKeys + kSums) * kMaxRows);
    weights_ = memory.take<int32_t>(kSplitKeys * kMaxRows);
    values_ = memory.take<int32_t>(kPanelStride * padded_dims(args_) / kPanelDims);
    keys_ = memory.take<const T*>(kSplitKeys);
    int32_t* rows = memory.take<int32_t>(kLanes * query_words(args_));
    for (int v = 0; v < vectors_; ++v) pack_queries(v, rows);
  }

  int64_t end_split() const { return ceil_div(visible_end(index_.num_rows - 1), kSplitKeys); }

  void attend(int64_t split, Partial& partial) {
    switch (vectors_) {
      case 1: return attend_split<1>(split, partial);
      case 2: return attend_split<2>(split, partial);
      case 3: return attend_split<3>(split, partial);
      default: return attend_split<4>(split, partial);
    }
  }

  // Folds the next split into what was merged so far, from split 1 on: every row sees split 0 and begins with it.
  void merge(Partial& merged, const Partial& next, int64_t split) const {
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

  void store_output(const Partial& merged) const {
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

  int64_t token(int64_t row) const { return first_token_ + (index_.first_row + row) / args_.num_heads; }
  int64_t head(int64_t row) const { return (index_.first_row + row) % args_.num_heads; }
  int64_t visible_end(int64_t row) const { return first_position_ + token(row) - first_token_ + 1; }

  // How many keys of a split the rows of vector v see; lanes without a row see what the last row sees.
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

  void find_keys(int64_t split, int64_t num_keys) {
    const int64_t begin = split * kSplitKeys, end = begin + num_keys, row_dims = args_.latent_dim + args_.rope_dim;
    const int32_t* block_table = args_.block_tables + index_.sequence * args_.block_table_stride;
    for (int64_t position = begin; position < end;) {
      const int64_t block = block_table[position / args_.block_size];
      const int64_t block_end = min64(end, (position / args_.block_size + 1) * args_.block_size);
      const T* row = static_cast<const T*>(args_.cache) +
                     (block * args_.block_size + position % args_.block_size) * row_dims;
      for (; position < block_end; ++position, row += row_dims) keys_[position - begin] = row;
    }
  }

  template <int kVectors>
  void attend_split(int64_t split, Partial& partial) {
    I32 end[kVectors];
    int64_t least = kSplitKeys, most = 0;
    for (int v = 0; v < kVectors; ++v) {
      end[v] = ends(split, v);
      least = min64(least, end[v][0]);
      most = max64(most, end[v][kLanes - 1]);
    }
    find_keys(split, most);
    for (int64_t key = 0; key < most; key += kLanes) {
      pack_keys(key, most);
      const int64_t stop = min64(kLanes, most - key);
      for (int64_t j = 0; j < stop; j += broadcasts(kVectors)) score_keys<kVectors>(key + j, j, most);
    }
    for (int v = 0; v < kVectors; ++v) weigh_scores<kVectors>(v, end[v], most, partial);
    // Words of keys that all rows see, and of those that some do. One that a row does not see must not be added with a
    // weight of zero, which would turn an infinite value of a later token into NaN.
    const int64_t num_words = ceil_div(most, kPerWord<T>);
    const int64_t common = least == most ? num_words : least / kPerWord<T>;
    for (int64_t first = 0; first < num_words; first += kPackedKeys / kPerWord<T>) {
      const int64_t last = min64(num_words, first + kPackedKeys / kPerWord<T>);
      pack_values(first, last, most);
      add_values<kVectors>(first, last, common, end, partial.output);
    }
  }

  // The keys [first, first + kLanes) as [word][key], so that one address reaches all of them; past `num_keys` the last.
  void pack_keys(int64_t first, int64_t num_keys) {
    const int64_t dims = args_.latent_dim + args_.rope_dim, whole = dims / (kLanes * kPerWord<T>) * kLanes;
    const T* key[kLanes];
    for (int j = 0; j < kLanes; ++j) key[j] = keys_[min64(first + j, num_keys - 1)];
    for (int64_t word = 0; word < whole; word += kLanes) {
      pack_words(word, [&](int j) { return load_words(key[j] + word * kPerWord<T>); });
    }
    if (whole == words_) return;
    pack_words(whole, [&](int j) {
      alignas(64) T padded[kLanes * kPerWord<T>] = {};
      const int64_t from = whole * kPerWord<T>;
      __builtin_memcpy(padded, key[j] + from, static_cast<size_t>(dims - from) * sizeof(T));
      return load_words(padded);
    });
  }

  template <class Load>
  void pack_words(int64_t word, const Load& load) {
    I32 block[kLanes];
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j) block[j] = load(j);
    transpose(block);
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j) store_words(packed_keys_ + (word + j) * kLanes, block[j]);
  }

  // Blocks lie anywhere in memory, so the hardware cannot guess which comes next.
  void prefetch_key(int64_t key, int64_t num_keys) const {
    if (key >= num_keys) return;
    const int64_t row_bytes = (args_.latent_dim + args_.rope_dim) * static_cast<int64_t>(sizeof(T));
    for (int64_t byte = 0; byte < row_bytes; byte += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(keys_[key]) + byte);
    }
  }

  // Scores of the kKeys packed keys from `offset` on, which are the split's from `first` on, not yet scaled; meanwhile
  // the keys that are packed next are fetched.
  template <int kVectors>
  void score_keys(int64_t first, int64_t offset, int64_t num_keys) {
    constexpr int kKeys = broadcasts(kVectors);
    F32 sums[kKeys][kVectors] = {};
    const int32_t* query = queries_;
    const int32_t* key = packed_keys_ + offset;
    int64_t word = 0;
    for (int piece = 0; piece < kKeys; ++piece) {
      prefetch_key(first + kLanes + piece, num_keys);
      for (const int64_t end = words_ * (piece + 1) / kKeys; word < end; ++word) {
        I32 column[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) column[v] = load_words(query + v * kLanes);
#pragma GCC unroll 16
        for (int j = 0; j < kKeys; ++j) {
          const I32 dim = broadcast_int(key[j]);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) sums[j][v] = multiply_add<T>(sums[j][v], dim, column[v]);
        }
        query += kVectors * kLanes;
        key += kLanes;
      }
    }
#pragma GCC unroll 16
    for (int j = 0; j < kKeys; ++j) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store(scores_ + ((first + j) * kVectors + v) * kLanes, sums[j][v]);
    }
  }

  // Scores of vector v into weights exp(score - max), as words of keys, and their maxima and sums.
  template <int kVectors>
  void weigh_scores(int v, I32 end, int64_t num_keys, Partial& partial) {
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
      if constexpr (kPerWord<T> == 2) packed = (I32)((U32)packed >> 16 | (U32)weight(word * 2 + 1));
      store_words(weights_ + (word * kVectors + v) * kLanes, packed);
    }
    store(partial.max + v * kLanes, largest);
    store(partial.sum + v * kLanes, sum);
  }

  // Values of the words [first, last) of keys, as [panel of dims][word][dim]; zeros from key `num_keys` on.
  void pack_values(int64_t first, int64_t last, int64_t num_keys) {
    const int64_t dims = args_.latent_dim;
    for (int64_t word = first; word < last; ++word) {
      const int64_t key = word * kPerWord<T>;
      const bool whole = key + kPerWord<T> <= num_keys;
      for (int64_t panel = 0; panel * kPanelDims < dims; ++panel) {
        int32_t* to = values_ + panel * kPanelStride + (word - first) * kPanelDims;
        for (int64_t i = 0; i < kPanelDims; i += kLanes) {
          const int64_t dim = panel * kPanelDims + i, n = max64(0, dims - dim);
          I32 packed = (I32)load_n(keys_[key] + dim, n);
          if constexpr (kPerWord<T> == 2) {
            const F32 odd = whole ? load_n(keys_[key + 1] + dim, n) : F32{};
            packed = (I32)((U32)packed >> 16 | (U32)odd);
          }
          store_words(to + i, packed);
        }
      }
    }
  }

  template <int kVectors>
  void add_values(int64_t first, int64_t last, int64_t common, const I32 (&end)[kVectors], float* output) {
    constexpr int kDims = broadcasts(kVectors);
    for (int64_t dim = 0; dim < args_.latent_dim; dim += kDims) {
      const int32_t* panel = values_ + dim / kPanelDims * kPanelStride + dim % kPanelDims;
      F32 sums[kDims][kVectors];
#pragma GCC unroll 16
      for (int d = 0; d < kDims; ++d) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          sums[d][v] = first == 0 ? F32{} : load(output + ((dim + d) * kVectors + v) * kLanes);
        }
      }
      for (int64_t word = first; word < min64(last, common); ++word) {
        const int32_t* value = panel + (word - first) * kPanelDims;
        I32 weight[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) weight[v] = load_words(weights_ + (word * kVectors + v) * kLanes);
#pragma GCC unroll 16
        for (int d = 0; d < kDims; ++d) {
          const I32 broadcasted = broadcast_int(value[d]);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) sums[d][v] = multiply_add<T>(sums[d][v], broadcasted, weight[v]);
        }
      }
      for (int64_t word = max64(first, common); word < last; ++word) {
        add_seen<kDims, kVectors>(panel + (word - first) * kPanelDims, word, end, sums);
      }
#pragma GCC unroll 16
      for (int d = 0; d < kDims; ++d) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) store(output + ((dim + d) * kVectors + v) * kLanes, sums[d][v]);
      }
    }
  }

  // One word of keys, added in the lanes that see it; of a pair, some lanes may see the first key only.
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
        const F32 with_all = multiply_add<T>(sum, broadcast_int(value[d]), weight);
        F32 other = sum;
        if constexpr (kPerWord<T> == 2) {
          other = first ? multiply_add<T>(sum, broadcast_int(value[d] & 0xffff), weight) : sum;
        }
        sums[d][v] = all ? with_all : other;
      }
    }
  }

  const MlaAttentionArgs& args_;
  const TileIndex index_;
  const int vectors_;
  const int64_t first_token_, first_position_;
  const int64_t words_;         // of a query or key
  int32_t* queries_ = nullptr;  // [words][rows]
  int32_t* packed_keys_ = nullptr;
  float* scores_ = nullptr;     // [kSplitKeys + kSums][rows]
  int32_t* weights_ = nullptr;  // [words of keys][rows]
  int32_t* values_ = nullptr;   // see pack_values
  const T** keys_ = nullptr;    // the split's rows of the cache
};

}  // namespace shardline::SHARDLINE_ISA::mla
