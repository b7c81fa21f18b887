// Words: what the products of attention multiply. Keys and values are packed into words once per split, and every row
// of a tile uses them.
//
// A word has 32 bits: one fp32, or a pair of bf16 of which both products are added. The template parameter W is the
// type of a word's elements. Packing never rounds.
#pragma once

#include "simd/transpose.h"
#include "simd/vec.h"

namespace shardline::SHARDLINE_ISA {

// Keys are cut into splits of this size, anchored at absolute position.
constexpr int64_t kSplitKeys = 512;

// Elements of a word.
template <class W>
constexpr int64_t kPerWord = 4 / static_cast<int64_t>(sizeof(W));

template <class W>
constexpr int64_t words_of(int64_t elements) {
  return ceil_div(elements, kPerWord<W>);
}

inline int64_t whole_vectors(int64_t words) { return ceil_div(words, kLanes) * kLanes; }

// sum + a * b; of pairs, both products.
template <class W>
inline F32 multiply_words(F32 sum, I32 a, I32 b) {
  if constexpr (kPerWord<W> == 2) {
    return dot_pairs(sum, a, b);
  } else {
    return fma((F32)a, (F32)b, sum);
  }
}

inline I32 load_words(const void* p) {
  I32 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline void store_words(int32_t* p, I32 v) { __builtin_memcpy(p, &v, sizeof v); }

inline I32 load_as_pairs(const bf16* p) { return load_pairs(p); }
// Every byte is a bf16 exactly.
inline I32 load_as_pairs(const int8_t* p) { return rounded_pairs(load(p), load(p + kLanes)); }

// kLanes pairs of floats that are bf16 exactly.
inline I32 join_pairs(F32 first, F32 second) { return (I32)(((U32)first >> 16) | (U32)second); }

// kLanes words of a row of Stored that has n elements left, filled up with zeros.
template <class W, class Stored>
inline I32 load_elements(const Stored* p, int64_t n) {
  if constexpr (kPerWord<W> == 2) {
    if (n >= 2 * kLanes) return load_as_pairs(p);
    alignas(64) Stored padded[2 * kLanes] = {};
    __builtin_memcpy(padded, p, static_cast<size_t>(n) * sizeof(Stored));
    return load_as_pairs(padded);
  } else {
    return (I32)load_n(p, n);
  }
}

// kLanes keys become [words of a key][kLanes].
template <class W, class Stored>
inline void pack_keys(const Stored* const* keys, int64_t dim, int32_t* packed) {
  const int64_t words = words_of<W>(dim);
  for (int64_t word = 0; word < words; word += kLanes) {
    I32 rows[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      rows[i] = load_elements<W>(keys[i] + word * kPerWord<W>, dim - word * kPerWord<W>);
    }
    transpose(rows);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store_words(packed + (word + i) * kLanes, rows[i]);
  }
}

#if defined(__AVX512BF16__)
// Interleaves elements 0..15 of a and b, then elements 16..31.
inline void interleave(I32 a, I32 b, int32_t* to) {
  alignas(64) static constexpr uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                    8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  store_words(to, (I32)_mm512_permutex2var_epi16((__m512i)a, low, (__m512i)b));
  store_words(to + kLanes, (I32)_mm512_permutex2var_epi16((__m512i)a, high, (__m512i)b));
}
#endif

// The values of one word's keys become a row of words, one word per column.
template <class W, class Stored>
inline void pack_values(const Stored* const* values, int64_t dim, int32_t* packed) {
  int64_t column = 0;
#if defined(__AVX512BF16__)
  if constexpr (kPerWord<W> == 2) {
    for (; column + 2 * kLanes <= dim; column += 2 * kLanes) {
      interleave(load_as_pairs(values[0] + column), load_as_pairs(values[1] + column), packed + column);
    }
  }
#endif
  for (; column < dim; column += kLanes) {
    const F32 first = load_n(values[0] + column, dim - column);
    if constexpr (kPerWord<W> == 2) {
      const F32 second = load_n(values[1] + column, dim - column);
      store_words(packed + column, join_pairs(first, second));
    } else {
      store_words(packed + column, (I32)first);
    }
  }
}

// Asks for a row that is needed soon.
template <class Element>
inline void prefetch(const Element* row, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 64 / static_cast<int64_t>(sizeof(Element))) __builtin_prefetch(row + d);
}

}  // namespace shardline::SHARDLINE_ISA
