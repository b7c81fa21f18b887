// The keys and values of one split, as panels of words.
#pragma once

#include "attention/attention_args.h"
#include "attention/attention_operands.h"
#include "attention/byte_pairs.h"
#include "simd/transpose.h"
#include "simd/vec_fp8.h"

namespace shardline::SHARDLINE_ISA {

// How far ahead of the products panels are fetched, into L2 and into L1.
constexpr int64_t kAheadPanels = 16, kAheadPanelsL1 = 4;

// The panels that are read after a split: the first ones of the next split.
struct NextPanels {
  const void* panels[kAheadPanels];
};

// Lines that are fetched one by one while products take their time.
struct FetchAhead {
  const char *to_l2, *to_l1;

  template <bool kAlsoL1 = false>
  void fetch_at(int64_t offset) const {
    __builtin_prefetch(to_l2 + offset, 0, kToL2);
    if constexpr (kAlsoL1) __builtin_prefetch(to_l1 + offset);
  }
  // Fetches the next lines.
  template <bool kAlsoL1, int kLines>
  void fetch() {
#pragma GCC unroll 4
    for (int line = 0; line < kLines; ++line) fetch_at<kAlsoL1>(line * 64);
    to_l2 += kLines * 64;
    if constexpr (kAlsoL1) to_l1 += kLines * 64;
  }
};

// Walks over the panels of a sequence's KV head, from a position on.
class PanelWalk {
 public:
  PanelWalk(const AttentionArgs& args, int64_t sequence, int64_t kv_head, int64_t position)
      : args_(args),
        block_(args.block_tables + sequence * args.block_table_stride + position / args.block_size),
        kv_head_(kv_head),
        offset_(position % args.block_size) {}

  // The place of the panel's first token among the tokens of all blocks and KV heads.
  int64_t slot() const { return (*block_ * args_.num_kv_heads + kv_head_) * args_.block_size + offset_; }
  void advance() {
    offset_ += kPanelTokens;
    if (offset_ < args_.block_size) return;
    offset_ = 0;
    ++block_;
  }

 private:
  const AttentionArgs& args_;
  const int32_t* block_;
  const int64_t kv_head_;
  int64_t offset_;
};

// Finds the panels of a split in the paged cache. Where the cache holds other elements than words, or latents, whose
// order is that of keys, a panel becomes words when a row first needs it: a single pass then still finds it in L1.
// A single pass over bytes can also make pairs of them in registers.
template <class W, class Stored, bool kLatents>
class KvSplit {
 public:
  static constexpr bool kScaled = sizeof(Stored) == 1;
  static constexpr bool kHoldsKeys = sizeof(Stored) == sizeof(W);  // as words
  static constexpr bool kHoldsValues = kHoldsKeys && !kLatents;
  static constexpr bool kScaledLatents = kScaled && kLatents;
  static constexpr bool kDecodesBytes = kScaled && !kLatents && kHasBf16Dot && kPerWord<W> == 2;
  // Latents are wide: few panels ahead are many lines, and L1 holds no panels that wait.
  static constexpr bool kFetchesToL1 = !kLatents;
  // Panels that pass together: they stay in L1, or latents in L2, while all rows and columns use them.
  static constexpr int64_t kGroupPanels = kLatents ? 8 : 4;

  // Four-byte words of memory for the panels that become words.
  static size_t scratch_words(const AttentionArgs& args) {
    const int64_t value_columns = kLatents ? ceil_div(args.value_dim, kBlockColumns) * kBlockColumns : args.value_dim;
    const int64_t width = (kHoldsKeys ? 0 : args.key_dim) + (kHoldsValues ? 0 : value_columns);
    return static_cast<size_t>(kPlaces * kPanelWords * width);
  }

  void prepare(int32_t* memory, const AttentionArgs& args) {
    key_dim_ = args.key_dim;
    value_dim_ = args.value_dim;
    stored_dim_ = stored_key_dim(args);
    is_e4m3_ = args.stored == DType::kFloat8E4m3;
    key_words_ = memory;
    value_words_ = memory + (kHoldsKeys ? 0 : kPlaces * kPanelWords * key_dim_);
  }

  // Starts with another split, of which the keys `seen` are read, counted from the split's first. Only blocks that hold
  // one of them are looked up: blocks before the window may be free already. If rows pass once, each panel becomes
  // words in the place of one before, and panels are fetched ahead.
  void find(const AttentionArgs& args, int64_t sequence, int64_t kv_head, int64_t split, Range seen, bool pass_once,
            const NextPanels& next) {
    first_ = seen.begin / kPanelTokens;
    end_ = ceil_div(seen.end, kPanelTokens);
    const int64_t count = end_ - first_;
    __builtin_memcpy(reads_ + (kLatents ? count : 2 * count), next.panels, sizeof next.panels);
    pass_once_ = pass_once;
    PanelWalk walk(args, sequence, kv_head, split * kSplitKeys + first_ * kPanelTokens);
    for (int64_t panel = first_; panel < end_; ++panel, walk.advance()) {
      const int64_t slot = walk.slot();
      reads_[panel - first_] = as_bytes(static_cast<const Stored*>(args.key_cache) + slot * stored_key_dim(args));
      if constexpr (kScaledLatents) {
        ropes_[panel] = args.rope_cache + slot * (key_dim_ - value_dim_);
      }
      if constexpr (!kLatents) {
        reads_[panel - first_ + count] = as_bytes(static_cast<const Stored*>(args.value_cache) + slot * value_dim_);
      }
      if constexpr (kScaled) {
        key_scales_[panel] = args.key_scales + slot;
        value_scales_[panel] = args.value_scales + slot;
        fetch_scales(args, slot);
      }
    }
    if constexpr (kScaled) {  // weights are computed for pairs of vectors, so for a panel beside the last, too
      value_scales_[first_ / 2 * 2] = value_scales_[first_];
      value_scales_[(end_ - 1) | 1] = value_scales_[end_ - 1];
    }
    if constexpr (!kHoldsValues) {
      for (int64_t place = 0; place < kPlaces; ++place) held_keys_[place] = held_values_[place] = -1;
    }
  }

  // The keys from the split's key `first` on, a multiple of kLanes: words at a distance of kPanelTokens.
  const int32_t* keys(int64_t first) { return key_panel(first / kPanelTokens) + first % kPanelTokens; }
  // The values of a panel: [kPanelTokens / kPerWord][value_stride] from each column's value_offset() on. They must be
  // held. No call may interrupt products, whose sums fill the registers.
  const int32_t* values(int64_t panel) const {
    if constexpr (kHoldsValues) return reinterpret_cast<const int32_t*>(value_bytes(panel));
    return value_words_ + place_of(panel) * kPanelWords * value_stride();
  }
  // Makes words of the values [begin, end) of one group, also counted in words.
  void hold_values(Range words) {
    if constexpr (!kHoldsValues) {
      for (int64_t panel = words.begin / kPanelWords; panel * kPanelWords < words.end; ++panel) {
        held(panel, held_values_, value_words_, value_stride(), [&](int32_t* to) {
          if constexpr (kLatents) {
            transpose_latents(key_panel(panel), panel, to);
          } else {
            widen(value_bytes(panel), value_dim_, after_values(panel), to);
          }
        });
      }
    }
  }

  // The panels that can be read.
  Range panels() const { return {first_, end_}; }
  // A panel as it is stored.
  const Stored* key_bytes(int64_t panel) const { return reinterpret_cast<const Stored*>(reads_[panel - first_]); }
  const Stored* value_bytes(int64_t panel) const {
    return reinterpret_cast<const Stored*>(reads_[panel - first_ + end_ - first_]);
  }
  BytePairs byte_pairs() const { return BytePairs(is_e4m3_); }

  // What to fetch while a panel's keys or values are multiplied. The values follow the keys, and the next split follows
  // the values. The values of latents are their keys: when these become values, the next split is fetched.
  FetchAhead after_keys(int64_t panel) const {
    if constexpr (kLatents) return {reads_[min64(panel + kAheadPanels / 2, end_ - 1) - first_], nullptr};
    return ahead_of(panel - first_);
  }
  FetchAhead after_values(int64_t panel) const { return ahead_of(panel - first_ + end_ - first_); }

  // The first panels of keys that a tile sees in a split; the last one is repeated.
  static NextPanels first_panels(const AttentionArgs& args, int64_t sequence, int64_t kv_head, int64_t first_position,
                                 int64_t end_position) {
    NextPanels next;
    int64_t position = first_position / kPanelTokens * kPanelTokens;
    PanelWalk walk(args, sequence, kv_head, position);
    for (int64_t i = 0; i < kAheadPanels; ++i) {
      const int64_t slot = walk.slot();
      next.panels[i] = static_cast<const Stored*>(args.key_cache) + slot * stored_key_dim(args);
      if constexpr (kScaled) fetch_scales(args, slot);
      position += kPanelTokens;
      if (position < end_position) walk.advance();
    }
    return next;
  }

  // Scales of kLanes keys or values; those of keys that nobody sees may be anything.
  F32 key_scales(int64_t key) const { return load(key_scales_[key / kPanelTokens] + key % kPanelTokens); }
  F32 value_scales(int64_t key) const { return load(value_scales_[key / kPanelTokens] + key % kPanelTokens); }

  int64_t key_words() const { return words_of<W>(key_dim_); }
  // Words of a key before its scale applies: the rotated part of latents has none.
  int64_t scaled_words() const { return words_of<W>(kScaledLatents ? value_dim_ : key_dim_); }
  int64_t value_dim() const { return value_dim_; }
  int64_t value_stride() const { return kLatents ? kBlockColumns : value_dim_; }
  int64_t value_offset(int64_t column) const {
    if constexpr (!kLatents) return column;
    return column / kBlockColumns * (kPlaces * kPanelWords * kBlockColumns) + column % kBlockColumns;
  }
  bool pass_once() const { return pass_once_; }
  // Whether a single pass decodes bytes: they must fill whole lines.
  bool decodes_bytes() const { return kDecodesBytes && pass_once_ && key_dim_ % 4 == 0 && value_dim_ % 32 == 0; }

 private:
  static constexpr int64_t kPanelWords = kPanelTokens / kPerWord<W>;          // of one column
  static constexpr int64_t kPlaces = kLatents ? kGroupPanels : kSplitPanels;  // rows always pass once over latents
  // Values of latents are [blocks of columns][panels][words of tokens][columns of the block], so that the products of
  // a block read memory in order.
  static constexpr int64_t kBlockColumns = 64;

  // Elements of a key in the key cache.
  static int64_t stored_key_dim(const AttentionArgs& args) { return kScaledLatents ? args.value_dim : args.key_dim; }

  static void fetch_scales(const AttentionArgs& args, int64_t slot) {
    __builtin_prefetch(args.key_scales + slot);
    __builtin_prefetch(args.value_scales + slot);
  }

  int64_t place_of(int64_t panel) const { return pass_once_ ? panel % kGroupPanels : panel; }

  // The words of a panel of `dim` columns, which convert(to) writes if they are not there.
  template <class Convert>
  const int32_t* held(int64_t panel, int64_t* held, int32_t* memory, int64_t dim, const Convert& convert) {
    const int64_t place = place_of(panel);
    int32_t* to = memory + place * kPanelWords * dim;
    if (held[place] != panel) convert(to);
    held[place] = panel;
    return to;
  }

  const int32_t* key_panel(int64_t panel) {
    if constexpr (kHoldsKeys) {
      return reinterpret_cast<const int32_t*>(key_bytes(panel));
    } else {
      return held(panel, held_keys_, key_words_, key_dim_, [&](int32_t* to) {
        widen(key_bytes(panel), kScaledLatents ? value_dim_ : key_dim_, after_keys(panel), to);
        if constexpr (kScaledLatents) {
          const bf16* later = ropes_[min64(panel + kAheadPanels / 2, end_ - 1)];
          convert(ropes_[panel], key_dim_ - value_dim_, {reinterpret_cast<const char*>(later), nullptr},
                  to + scaled_words() * kPanelTokens);
        }
      });
    }
  }

  // The bytes of a panel of `dim` columns as the elements of words.
  void widen(const Stored* from, int64_t dim, const FetchAhead& ahead, int32_t* to) const {
    if (is_e4m3_) return convert(reinterpret_cast<const e4m3*>(from), dim, ahead, to);
    convert(from, dim, ahead, to);
  }

  template <class Element>
  void convert(const Element* from, int64_t dim, const FetchAhead& ahead, int32_t* to) const {
    constexpr int64_t kStep = kPerWord<W> * kLanes;
    int64_t i = 0;
#if defined(__AVX512VBMI__)
    if constexpr (sizeof(Element) == 1 && kPerWord<W> == 2) {
      const BytePairs pairs = byte_pairs();
      for (; i + 2 * kStep <= kPanelTokens * dim; i += 2 * kStep) {
        ahead.fetch_at(i);
        I32 first, second;
        pairs.decode(from + i, first, second);
        store_words(to + i / 2, first);
        store_words(to + i / 2 + kLanes, second);
      }
    }
#endif
    for (; i < kPanelTokens * dim; i += kStep) {
      ahead.fetch_at(i * static_cast<int64_t>(sizeof(Element)));
      if constexpr (kPerWord<W> == 2 && sizeof(Element) == 2) {
        store_words(to + i / 2, load_words(from + i));
      } else if constexpr (kPerWord<W> == 2) {
        store_words(to + i / 2, rounded_pairs(load(from + i), load(from + i + kLanes)));  // bytes are bf16 exactly
      } else {
        store_words(to + i, (I32)load(from + i));
      }
    }
  }

  // A panel of latents, [words of a key][tokens], as values. Meanwhile half a panel of the next split is fetched.
  void transpose_latents(const int32_t* from, int64_t panel, int32_t* to) const {
    constexpr int64_t kWord = kPerWord<W>, kStep = kWord * kLanes;
    const int64_t half_bytes = stored_dim_ * kPanelTokens * static_cast<int64_t>(sizeof(Stored)) / 2;
    const int64_t later = panel - first_, step_bytes = ceil_div(half_bytes, ceil_div(value_dim_, kStep));
    const char* ahead = reads_[end_ - first_ + later / 2] + later % 2 * half_bytes;
    for (int64_t token = 0; token < kPanelTokens; token += kLanes) {
      for (int64_t dim = 0; dim < value_dim_; dim += kStep) {
        I32 block[kLanes];
#pragma GCC unroll 16
        for (int64_t i = 0; i < kLanes; ++i) {
          // Pairs of dims stay together, so neighbours are vectors whose columns are kLanes apart.
          const int64_t place = (dim / kWord + i / kWord + i % kWord * (kLanes / kWord)) * kPanelTokens;
          block[i] = place < key_words() * kPanelTokens ? words_of_tokens(from + place + token) : I32{};
        }
        for (int64_t i = 0; i < step_bytes; i += 64) __builtin_prefetch(ahead + i, 0, kToL2);
        ahead += step_bytes;
        transpose<kWord>(block);
#pragma GCC unroll 16
        for (int64_t i = 0; i < kLanes; ++i) {
          store_words(to + (token + i) / kWord * kBlockColumns + value_offset(dim + i % kWord * kLanes), block[i]);
        }
      }
    }
  }

  // Words of kLanes tokens. Of pairs, two elements of two neighbouring tokens become two tokens of two elements.
  static I32 words_of_tokens(const int32_t* from) {
    if constexpr (kPerWord<W> == 1) return load_words(from);
#if defined(__AVX512BF16__)
    const __m128i places = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    return (I32)_mm512_shuffle_epi8((__m512i)load_words(from), _mm512_broadcast_i32x4(places));
#else
    return I32{};
#endif
  }

  FetchAhead ahead_of(int64_t i) const { return {reads_[i + kAheadPanels], reads_[i + kAheadPanelsL1]}; }
  static const char* as_bytes(const Stored* panel) { return reinterpret_cast<const char*>(panel); }

  int64_t key_dim_, value_dim_, stored_dim_;
  bool is_e4m3_;  // bytes; else they are signed integers
  int32_t *key_words_, *value_words_;
  int64_t first_, end_;  // panels
  bool pass_once_;
  int64_t held_keys_[kSplitPanels], held_values_[kSplitPanels];  // the panels whose words are in memory
  const char* reads_[2 * kSplitPanels + kAheadPanels];           // the panels of keys, of values, and of the next split
  const bf16* ropes_[kScaledLatents ? kSplitPanels : 1];
  const float *key_scales_[kSplitPanels], *value_scales_[kSplitPanels];
};

}  // namespace shardline::SHARDLINE_ISA
