// Keys and values as the multiplies of attention want them: packed once per split, used by every row of a tile.
//
// Operands are 32-bit words: an fp32, or a pair of bf16 where the ISA multiplies pairs. Packing never rounds.
#pragma once

#include "dispatch/kernels.h"
#include "simd/transpose.h"
#include "simd/vec.h"

namespace shardline::SHARDLINE_ISA {

constexpr int64_t kSplitKeys = 512;
constexpr int64_t kGroupKeys = 64;  // keys that are packed, and scored, together

// Elements of a word, when the model computes in T.
template <class T>
constexpr int64_t kPerWord = 1;
template <>
constexpr int64_t kPerWord<bf16> = kHasBf16Dot ? 2 : 1;

template <class T>
constexpr int64_t words_of(int64_t elements) {
  return ceil_div(elements, kPerWord<T>);
}

inline int64_t whole_vectors(int64_t words) { return ceil_div(words, kLanes) * kLanes; }

// sum + a * b, or both products of each pair.
template <class T>
inline F32 multiply_words(F32 sum, I32 a, I32 b) {
  if constexpr (kPerWord<T> == 2) {
    return dot_pairs(sum, a, b);
  } else {
    return fma((F32)a, (F32)b, sum);
  }
}

inline I32 load_words(const int32_t* p) {
  I32 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline void store_words(int32_t* p, I32 v) { __builtin_memcpy(p, &v, sizeof v); }

inline I32 load_as_pairs(const bf16* p) { return load_pairs(p); }
inline I32 load_as_pairs(const int8_t* p) { return rounded_pairs(load(p), load(p + kLanes)); }  // bf16 holds any byte

// kLanes words of a row of Stored that has n elements left; zeros follow them.
template <class T, class Stored>
inline I32 load_elements(const Stored* p, int64_t n) {
  if constexpr (kPerWord<T> == 2) {
    if (n >= 2 * kLanes) return load_as_pairs(p);
    alignas(64) Stored padded[2 * kLanes] = {};
    __builtin_memcpy(padded, p, static_cast<size_t>(n) * sizeof(Stored));
    return load_as_pairs(padded);
  } else {
    return (I32)load_n(p, n);
  }
}

// kLanes keys become [words of a key][kLanes].
template <class T, class Stored>
inline void pack_keys(const Stored* const* keys, int64_t dim, int32_t* packed) {
  const int64_t words = words_of<T>(dim);
  for (int64_t word = 0; word < words; word += kLanes) {
    I32 rows[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      rows[i] = load_elements<T>(keys[i] + word * kPerWord<T>, dim - word * kPerWord<T>);
    }
    transpose(rows);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store_words(packed + (word + i) * kLanes, rows[i]);
  }
}

#if defined(__AVX512BF16__)
// Elements 0..15 of a between those of b, then 16..31.
inline void interleave(I32 a, I32 b, int32_t* to) {
  alignas(64) static constexpr uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                    8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  store_words(to, (I32)_mm512_permutex2var_epi16((__m512i)a, low, (__m512i)b));
  store_words(to + kLanes, (I32)_mm512_permutex2var_epi16((__m512i)a, high, (__m512i)b));
}
#endif

// As many values as a word has elements become one row of words, a word per column.
template <class T, class Stored>
inline void pack_values(const Stored* const* values, int64_t dim, int32_t* packed) {
  int64_t column = 0;
#if defined(__AVX512BF16__)
  if constexpr (kPerWord<T> == 2) {
    for (; column + 2 * kLanes <= dim; column += 2 * kLanes) {
      interleave(load_as_pairs(values[0] + column), load_as_pairs(values[1] + column), packed + column);
    }
  }
#endif
  for (; column < dim; column += kLanes) {
    const F32 first = load_n(values[0] + column, dim - column);
    if constexpr (kPerWord<T> == 2) {
      const F32 second = load_n(values[1] + column, dim - column);
      store_words(packed + column, (I32)(((U32)first >> 16) | (U32)second));
    } else {
      store_words(packed + column, (I32)first);
    }
  }
}

struct Range {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

template <class T>
inline void prefetch(const T* row, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + d);
}

// The keys of one split that a tile can see, and their packed copies. A group is packed when a row first needs it, so
// that a lone row finds it in L1 still. The cache holds elements of Stored: T, or bytes and their scales.
template <class T, class Stored>
class Split {
 public:
  static constexpr bool kScaled = sizeof(Stored) == 1;
  static constexpr int64_t kNumGroups = kSplitKeys / kGroupKeys;

  static int64_t key_words(int64_t dim) { return whole_vectors(words_of<T>(dim)); }
  static size_t scratch_words(int64_t key_dim, int64_t value_dim) {
    return static_cast<size_t>(kSplitKeys * key_words(key_dim) + words_of<T>(kSplitKeys) * whole_vectors(value_dim));
  }

  void prepare(int32_t* memory, int64_t key_dim, int64_t value_dim) {
    key_dim_ = key_dim;
    value_dim_ = value_dim;
    packed_keys_ = memory;
    packed_values_ = memory + kSplitKeys * key_words(key_dim);
  }

  // Starts another split, of which the tile sees `known`, relative to the split; `key` and `value` are filled next.
  // Unless groups are kept, each is packed into the place of the one before: for rows that come but once, so that the
  // copies stay in L1.
  void begin(Range known, bool keep_groups) {
    known_ = known;
    keep_groups_ = keep_groups;
    num_fetched_ = 0;
    for (int64_t g = 0; g < kNumGroups; ++g) has_keys_[g] = has_values_[g] = false;
  }
  void set(int64_t place, const Stored* key, const Stored* value) {
    keys_[place] = key;
    values_[place] = value;
  }
  void set_scales(int64_t place, float key, float value) {
    key_scales_[place] = key;
    value_scales_[place] = value;
  }

  // The group's keys, [keys / kLanes][key_words][kLanes].
  const int32_t* key_group(int64_t group) {
    int32_t* packed = packed_keys_ + (keep_groups_ ? group * kGroupKeys * key_words(key_dim_) : 0);
    if (has_keys_[group]) return packed;
    claim(has_keys_, group);
    for (int64_t first = group * kGroupKeys; first < min64((group + 1) * kGroupKeys, known_.end); first += kLanes) {
      const Stored* keys[kLanes];
      for (int i = 0; i < kLanes; ++i) keys[i] = keys_[nearest_known(first + i)];
      fetch_until(first + kLanes - known_.begin + kFetchAhead);
      pack_keys<T>(keys, key_dim_, packed + (first - group * kGroupKeys) * key_words(key_dim_));
    }
    return packed;
  }

  // The values' words from the group's first, [words of a group][value_width].
  const int32_t* value_group(int64_t group) {
    int32_t* packed = packed_values_ + (keep_groups_ ? words_of<T>(group * kGroupKeys) * value_width() : 0);
    if (has_values_[group]) return packed;
    claim(has_values_, group);
    int32_t* row = packed;
    for (int64_t key = group * kGroupKeys; key < min64((group + 1) * kGroupKeys, known_.end); key += kPerWord<T>) {
      const Stored* values[2] = {values_[nearest_known(key)], values_[nearest_known(key + 1)]};
      if (key % kLanes == 0) fetch_until(known_.end - known_.begin + key + kLanes - known_.begin + kFetchAhead);
      pack_values<T>(values, value_dim_, row);
      row += value_width();
    }
    return packed;
  }

  bool has_values(int64_t group) const { return has_values_[group]; }

  // Scales of kLanes keys or values; of those that nobody sees, anything.
  F32 key_scales(int64_t place) const { return load(key_scales_ + place); }
  F32 value_scales(int64_t place) const { return load(value_scales_ + place); }

  int64_t key_words() const { return words_of<T>(key_dim_); }
  int64_t panel_words() const { return key_words(key_dim_) * kLanes; }
  int64_t value_width() const { return whole_vectors(value_dim_); }

 private:
  // Rows that are on their way from memory: blocks lie anywhere in it, so the hardware cannot guess the next one.
  static constexpr int64_t kFetchAhead = 64;

  int64_t nearest_known(int64_t key) const { return max64(known_.begin, min64(key, known_.end - 1)); }

  void claim(bool (&has)[kNumGroups], int64_t group) {
    if (!keep_groups_) {
      for (int64_t g = 0; g < kNumGroups; ++g) has[g] = false;
    }
    has[group] = true;
  }

  // Asks for the known keys, then the known values, as far as the first `count` of them all.
  void fetch_until(int64_t count) {
    const int64_t num_keys = known_.end - known_.begin;
    for (; num_fetched_ < min64(count, num_keys); ++num_fetched_) {
      prefetch(keys_[known_.begin + num_fetched_], key_dim_);
    }
    for (; num_fetched_ < min64(count, 2 * num_keys); ++num_fetched_) {
      prefetch(values_[known_.begin + num_fetched_ - num_keys], value_dim_);
    }
  }

  int64_t key_dim_, value_dim_;
  int32_t *packed_keys_, *packed_values_;
  Range known_;
  bool keep_groups_;
  int64_t num_fetched_;
  bool has_keys_[kNumGroups], has_values_[kNumGroups];
  const Stored* keys_[kSplitKeys];
  const Stored* values_[kSplitKeys];
  float key_scales_[kScaled ? kSplitKeys : 1], value_scales_[kScaled ? kSplitKeys : 1];
};

}  // namespace shardline::SHARDLINE_ISA
