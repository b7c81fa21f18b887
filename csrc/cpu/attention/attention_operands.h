// Words: what the products of attention multiply.
//
// A word has 32 bits: one fp32, or a pair of bf16 of which both products are added. The template parameter W is the
// type of a word's elements.
#pragma once

#include "attention/kv_pages.h"
#include "simd/vec.h"

namespace shardline::SHARDLINE_ISA {

// Keys are cut into splits of this size, anchored at absolute position.
constexpr int64_t kSplitKeys = 512;
constexpr int64_t kSplitPanels = kSplitKeys / kPanelTokens;

// Elements of a word.
template <class W>
constexpr int64_t kPerWord = 4 / static_cast<int64_t>(sizeof(W));

template <class W>
constexpr int64_t words_of(int64_t elements) {
  return ceil_div(elements, kPerWord<W>);
}

// The elements of words when a model computes in T: pairs of bf16 only where the ISA multiplies pairs.
template <class T, bool kPairs = kHasBf16Dot>
struct WordElement {
  using Type = float;
};
template <class T>
struct WordElement<T, true> {
  using Type = T;
};

struct Range {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

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

// The first n words; the other lanes are zero.
inline I32 load_words_n(const void* p, int64_t n) {
#if defined(__AVX512F__)
  return (I32)_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << n) - 1), p);
#else
  int32_t padded[kLanes] = {};
  __builtin_memcpy(padded, p, static_cast<size_t>(n) * sizeof padded[0]);
  return load_words(padded);
#endif
}

// kLanes words of a row that has n elements left, filled up with zeros.
template <class W, class T>
inline I32 load_elements(const T* p, int64_t n) {
  if constexpr (kPerWord<W> == 2) {
    if (n >= 2 * kLanes) return load_pairs(p);
    alignas(64) T padded[2 * kLanes] = {};
    __builtin_memcpy(padded, p, static_cast<size_t>(n) * sizeof(T));
    return load_pairs(padded);
  } else {
    return (I32)load_n(p, n);
  }
}

// Asks for a row that is needed soon.
template <class Element>
inline void prefetch(const Element* row, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 64 / static_cast<int64_t>(sizeof(Element))) __builtin_prefetch(row + d);
}

}  // namespace shardline::SHARDLINE_ISA
