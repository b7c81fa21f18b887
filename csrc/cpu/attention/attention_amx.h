// One split in the tile registers of AMX, for bf16: what attend_split() computes, in another order.
//
// A score is the sum over steps of 32 elements of the head, and an output is the sum over steps of 32 keys, anchored at
// the split. simd/amx.h has the order within a step.
#pragma once

#include "attention/attention_split.h"
#include "simd/amx.h"

namespace shardline::SHARDLINE_ISA {

constexpr int64_t kAmxDims = 32;  // heads are multiples of this

#if defined(__AMX_BF16__)

template <class T, class Stored, bool kLatents>
constexpr bool kUsesAmx = sizeof(T) == 2 && sizeof(Stored) == 2 && !kLatents;

constexpr int64_t kStepKeys = 32, kStepWords = kStepKeys / 2, kSplitSteps = kSplitKeys / kStepKeys;

// The values of the steps of a split, [16 pairs of keys][value_dim] words each. Two panels that do not follow each
// other in memory are copied together.
class JoinedValues {
 public:
  static size_t scratch_words(const AttentionArgs& args) {
    return static_cast<size_t>((kSplitSteps + 1) * kStepWords * args.value_dim);
  }

  void prepare(int32_t* memory, const AttentionArgs& args) {
    memory_ = memory;
    dim_ = args.value_dim;
  }
  void clear() {
    for (bool& copied : copied_) copied = false;
  }

  template <class Split>
  const int32_t* step(const Split& split, int64_t step) {
    const Range panels = split.panels();
    const int64_t panel = 2 * step, panel_words = kStepWords / 2 * dim_;
    const bool has_first = panel >= panels.begin, has_second = panel + 1 < panels.end;
    const int32_t* first = has_first ? split.values(panel) : nullptr;
    const int32_t* second = has_second ? split.values(panel + 1) : nullptr;
    if (has_first && has_second && second == first + panel_words) return first;
    int32_t* to = memory_ + step * kStepWords * dim_;
    if (!copied_[step]) {
      copy(first, to, panel_words);
      copy(second, to + panel_words, panel_words);
      copied_[step] = true;
    }
    return to;
  }

  // The same with zeros for the keys that are not visible, counted from the split's first.
  const int32_t* masked(const int32_t* values, int64_t step, Range visible) {
    int32_t* to = memory_ + kSplitSteps * kStepWords * dim_;
    for (int64_t word = 0; word < kStepWords; ++word) {
      const int64_t key = step * kStepKeys + 2 * word;
      uint32_t mask = 0;
      if (key >= visible.begin && key < visible.end) mask |= 0x0000ffffu;
      if (key + 1 >= visible.begin && key + 1 < visible.end) mask |= 0xffff0000u;
      const I32 kept = broadcast_int(static_cast<int32_t>(mask));
      for (int64_t d = 0; d < dim_; d += kLanes) {
        store_words(to + word * dim_ + d, load_words(values + word * dim_ + d) & kept);
      }
    }
    return to;
  }

  // Whether no value of a step is infinite or NaN.
  bool are_finite(const int32_t* values) const {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 found = 0;
    for (int64_t i = 0; i < kStepWords * dim_; i += kLanes) {
      const __m512i bits = _mm512_and_si512((__m512i)load_words(values + i), exponent);
      found |= _mm512_cmpeq_epi16_mask(bits, exponent);
    }
    return found == 0;
  }

 private:
  static void copy(const int32_t* from, int32_t* to, int64_t words) {
    for (int64_t i = 0; i < words; i += kLanes) store_words(to + i, from == nullptr ? I32{} : load_words(from + i));
  }

  int32_t* memory_;
  int64_t dim_;
  bool copied_[kSplitSteps];
};

// Rows at equal distances, in bytes.
struct AmxRows {
  char* data;
  int64_t stride;
};

// Adds a step of up to 32 rows and two blocks of columns to the sums.
template <bool kTwo>
inline void add_step(const char* x, int64_t x_stride, const int32_t* first, const int32_t* second, int64_t stride) {
  _tile_loadd(6, first, stride);
  _tile_loadd(4, x, x_stride);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, second, stride);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (kTwo) {
    _tile_loadd(5, x + kAmxRows * x_stride, x_stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}
template <bool kTwo>
inline void store_sums(const AmxRows& to) {
  _tile_stored(0, to.data, to.stride);
  _tile_stored(1, to.data + kAmxRowBytes, to.stride);
  if constexpr (kTwo) {
    _tile_stored(2, to.data + kAmxRows * to.stride, to.stride);
    _tile_stored(3, to.data + kAmxRows * to.stride + kAmxRowBytes, to.stride);
  }
}

// Fetches the lines of a later panel.
inline void fetch_panel(const char* panel, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(panel + line, 0, kToL2);
}

template <bool kTwo, class Split>
void score_in_tiles(const AmxRows& queries, const AmxRows& scores, Split& split, Range panels) {
  const int64_t num_steps = split.key_words() / kStepWords;
  for (int64_t panel = panels.begin / 2 * 2; panel < panels.end; panel += 2) {
    const int64_t first = max64(panel, panels.begin), second = min64(panel + 1, panels.end - 1);
    const int32_t *keys = split.keys(first * kPanelTokens), *next_keys = split.keys(second * kPanelTokens);
    if (split.pass_once()) {
      fetch_panel(split.after_keys(first).to_l2, split.key_words() * kPanelTokens * 4);
      if (second != first) fetch_panel(split.after_keys(second).to_l2, split.key_words() * kPanelTokens * 4);
    }
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTwo) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t s = 0; s < num_steps; ++s) {
      add_step<kTwo>(queries.data + s * kAmxRowBytes, queries.stride, keys + s * kStepWords * kPanelTokens,
                     next_keys + s * kStepWords * kPanelTokens, kAmxRowBytes);
    }
    store_sums<kTwo>({scores.data + panel * kPanelTokens * 4, scores.stride});
  }
}

// Adds the steps [steps.begin, steps.end) to the outputs; values(step) are those of a step.
template <bool kTwo, class Values>
void add_in_tiles(const AmxRows& weights, const AmxRows& outputs, int64_t value_dim, Range steps,
                  const Values& values) {
  for (int64_t column = 0; column < value_dim; column += 2 * kLanes) {
    const AmxRows sums = {outputs.data + column * 4, outputs.stride};
    _tile_loadd(0, sums.data, sums.stride);
    _tile_loadd(1, sums.data + kAmxRowBytes, sums.stride);
    if constexpr (kTwo) {
      _tile_loadd(2, sums.data + kAmxRows * sums.stride, sums.stride);
      _tile_loadd(3, sums.data + kAmxRows * sums.stride + kAmxRowBytes, sums.stride);
    }
    for (int64_t s = steps.begin; s < steps.end; ++s) {
      const int32_t* at = values(s, column) + column;
      add_step<kTwo>(weights.data + s * kAmxRowBytes, weights.stride, at, at + kLanes, value_dim * 4);
    }
    store_sums<kTwo>(sums);
  }
}

// Adds a step with values that are infinite or NaN, and that some rows must not see: each row alone, as if hidden
// values were zero.
template <class Split>
void add_masked_step(Row* rows, int num_rows, const Split& split, JoinedValues& joined, int64_t step) {
  configure_tiles(1);
  for (int r = 0; r < num_rows; ++r) {
    const int32_t* values = joined.masked(joined.step(split, step), step, rows[r].keys);
    finish_stores(values);
    const AmxRows weights = {reinterpret_cast<char*>(rows[r].scores), kAmxRowBytes};
    const AmxRows output = {reinterpret_cast<char*>(rows[r].partial.output), kAmxRowBytes};
    add_in_tiles<false>(weights, output, split.value_dim(), {step, step + 1}, [&](int64_t, int64_t) { return values; });
  }
  configure_tiles(num_rows);
}

// Gives keys outside of a row's own steps, but in the steps that all rows compute, weights of zero.
inline void clear_weights(Row& row, Range steps) {
  const Range own = {row.keys.begin / kStepKeys, ceil_div(row.keys.end, kStepKeys)};
  for (int64_t s = steps.begin; s < steps.end; ++s) {
    if (s < own.begin || s >= own.end) store_words(row.scores + s * kStepWords, I32{});
  }
}

template <bool kTwo, class Split>
void attend_in_tiles(Row* rows, int num_rows, Split& split, JoinedValues& joined, const AttentionArgs& args) {
  Range any = rows[0].keys, all = rows[0].keys;
  for (int r = 1; r < num_rows; ++r) {
    any = {min64(any.begin, rows[r].keys.begin), max64(any.end, rows[r].keys.end)};
    all = {max64(all.begin, rows[r].keys.begin), min64(all.end, rows[r].keys.end)};
  }
  const Range panels = {any.begin / kPanelTokens, ceil_div(any.end, kPanelTokens)};
  const Range steps = {any.begin / kStepKeys, ceil_div(any.end, kStepKeys)};
  const auto distance = [&](const auto* first, const auto* second) {
    return num_rows > 1 ? reinterpret_cast<const char*>(second) - reinterpret_cast<const char*>(first) : kAmxRowBytes;
  };
  const int last = num_rows > 1 ? 1 : 0;
  const AmxRows queries = {reinterpret_cast<char*>(const_cast<int32_t*>(rows[0].query)),
                           distance(rows[0].query, rows[last].query)};
  const AmxRows scores = {reinterpret_cast<char*>(rows[0].scores), distance(rows[0].scores, rows[last].scores)};
  const AmxRows outputs = {reinterpret_cast<char*>(rows[0].partial.output), scores.stride};
  finish_stores(queries.data);
  configure_tiles(num_rows);
  score_in_tiles<kTwo>(queries, scores, split, panels);
  for (int r = 0; r < num_rows; ++r) find_maximum<bf16>(rows[r], args);
  for (int r = 0; r < num_rows; ++r) {
    weigh_scores<bf16>(rows[r], split, args);
    clear_weights(rows[r], steps);
    for (int64_t d = 0; d < split.value_dim(); d += kLanes) store(rows[r].partial.output + d, F32{});
  }
  finish_stores(scores.data);
  const int64_t panel_bytes = kPanelTokens * split.value_dim() * 2;
  const auto values = [&](int64_t step, int64_t column) {
    if (column == 0 && split.pass_once()) {
      fetch_panel(split.after_values(max64(2 * step, panels.begin)).to_l2, panel_bytes);
      fetch_panel(split.after_values(min64(2 * step + 1, panels.end - 1)).to_l2, panel_bytes);
    }
    const int32_t* words = joined.step(split, step);
    finish_stores(words);
    return words;
  };
  // Weights of hidden keys are zero. So only values that are not finite need care.
  for (int64_t first = steps.begin, end; first < steps.end; first = end + 1) {
    for (end = first; end < steps.end; ++end) {
      const bool is_seen = end * kStepKeys >= all.begin && (end + 1) * kStepKeys <= all.end;
      if (!is_seen && !joined.are_finite(joined.step(split, end))) break;
    }
    if (end > first) add_in_tiles<kTwo>(scores, outputs, split.value_dim(), {first, end}, values);
    if (end < steps.end) add_masked_step(rows, num_rows, split, joined, end);
  }
  _tile_release();
}

// Computes one split for up to 32 rows, and fills each row's partial. Rows lie at equal distances in memory.
template <class Split>
void attend_split_in_tiles(Row* rows, int num_rows, Split& split, JoinedValues& joined, const AttentionArgs& args) {
  num_rows > kAmxRows ? attend_in_tiles<true>(rows, num_rows, split, joined, args)
                      : attend_in_tiles<false>(rows, num_rows, split, joined, args);
}

#else

template <class T, class Stored, bool kLatents>
constexpr bool kUsesAmx = false;

// Other ISAs need no such copies.
struct JoinedValues {
  static size_t scratch_words(const AttentionArgs&) { return 0; }
  void prepare(int32_t*, const AttentionArgs&) {}
  void clear() {}
};

#endif

}  // namespace shardline::SHARDLINE_ISA
