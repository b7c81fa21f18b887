// The order of a page, which holds the keys or values of one block and one KV head: they lie as the products of
// attention read them.
//
// Tokens are cut into panels of 16. A panel's keys are [words of a key][16 tokens], so that one load serves the scores
// of 16 tokens. Its values are [words of 16 tokens][value_dim], so that one load serves 16 columns. A word holds the
// elements that one lane multiplies: two of bf16 where pairs are multiplied, else one. Keys and values of one byte have
// the order of the elements that they become. Pages of latents have the order of keys.
// `shardline.kernels.pages` has the same in Python.
#pragma once

#include "simd/vec.h"

namespace shardline::SHARDLINE_ISA {

constexpr int64_t kPanelTokens = 16;

// Stores elements [first, first + count) of a key as one of its panel's 16 tokens; both are multiples of kWord.
template <int kWord, class Stored>
inline void put_key(const Stored* elements, int64_t first, int64_t count, Stored* panel, int64_t token) {
  Stored* to = panel + first * kPanelTokens + token * kWord;
  for (int64_t d = 0; d < count; d += kWord) __builtin_memcpy(to + d * kPanelTokens, elements + d, kWord * sizeof *to);
}

// Stores a value as one of its panel's 16 tokens. Another thread may store the other token of a word meanwhile.
template <int kWord, class Stored>
inline void put_value(const Stored* value, int64_t dim, Stored* panel, int64_t token) {
  Stored* to = panel + token / kWord * kWord * dim + token % kWord;
  for (int64_t d = 0; d < dim; ++d) to[d * kWord] = value[d];
}

}  // namespace shardline::SHARDLINE_ISA
