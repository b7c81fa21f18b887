// The keys and values of one split, as panels of words.
#pragma once

#include "attention/attention_args.h"
#include "attention/attention_operands.h"

namespace shardline::SHARDLINE_ISA {

constexpr int64_t kGroupPanels = 4;  // panels whose values pass together: they stay in L1 while columns are added
constexpr int64_t kGroupKeys = kGroupPanels * kPanelTokens;

// How far ahead of the products panels are fetched, into L2 and into L1.
constexpr int64_t kAheadPanels = 16, kAheadPanelsL1 = 4;

// The panels that are read after a split: the first ones of the next split.
struct NextPanels {
  const void* panels[kAheadPanels];
};

// Lines that are fetched one by one while products take their time.
struct FetchAhead {
  const char *to_l2, *to_l1;

  // With many rows, products fill the processor's window, and a line that is in L2 would be asked for too late.
  template <int kRows = 1>
  void fetch(int64_t offset) const {
    __builtin_prefetch(to_l2 + offset, 0, kToL2);
    if constexpr (kRows > 2) __builtin_prefetch(to_l1 + offset);
  }
};

// Finds the panels of a split in the paged cache. Where the cache holds other elements than words, a panel becomes
// words when a row first needs it: a single pass then still finds it in L1.
template <class W, class Stored>
class KvSplit {
 public:
  static constexpr bool kScaled = sizeof(Stored) == 1;
  static constexpr bool kHoldsWords = sizeof(Stored) == sizeof(W);

  // Four-byte words of memory for the panels that become words.
  static size_t scratch_words(const AttentionArgs& args) {
    if (kHoldsWords) return 0;
    return static_cast<size_t>(kSplitKeys / kPerWord<W> * (args.key_dim + args.value_dim));
  }

  void prepare(int32_t* memory, const AttentionArgs& args) {
    key_dim_ = args.key_dim;
    value_dim_ = args.value_dim;
    key_words_ = memory;
    value_words_ = memory + kSplitKeys / kPerWord<W> * key_dim_;
  }

  // Starts with another split, of which the keys `seen` are read, counted from the split's first. Only blocks that hold
  // one of them are looked up: blocks before the window may be free already. If rows pass once, each panel becomes
  // words in the place of one before, and panels are fetched ahead.
  void find(const AttentionArgs& args, int64_t sequence, int64_t kv_head, int64_t split, Range seen, bool pass_once) {
    const int32_t* block_table = args.block_tables + sequence * args.block_table_stride;
    first_ = seen.begin / kPanelTokens;
    end_ = ceil_div(seen.end, kPanelTokens);
    pass_once_ = pass_once;
    const int64_t first_position = split * kSplitKeys;
    for (int64_t panel = first_; panel < end_;) {
      const int64_t position = first_position + panel * kPanelTokens;
      const int64_t block = position / args.block_size, offset = position - block * args.block_size;
      int64_t slot = (block_table[block] * args.num_kv_heads + kv_head) * args.block_size + offset;
      const int64_t stop = min64(end_, panel + (args.block_size - offset) / kPanelTokens);
      for (; panel < stop; ++panel, slot += kPanelTokens) {
        keys_[panel] = static_cast<const Stored*>(args.key_cache) + slot * key_dim_;
        values_[panel] = static_cast<const Stored*>(args.value_cache) + slot * value_dim_;
        if constexpr (kScaled) {
          key_scales_[panel] = args.key_scales + slot;
          value_scales_[panel] = args.value_scales + slot;
          __builtin_prefetch(key_scales_[panel]);
          __builtin_prefetch(value_scales_[panel]);
        }
      }
    }
    if constexpr (kScaled) {  // weights are computed for pairs of vectors, so for a panel beside the last, too
      value_scales_[first_ / 2 * 2] = value_scales_[first_];
      value_scales_[(end_ - 1) | 1] = value_scales_[end_ - 1];
    }
    if constexpr (!kHoldsWords) {
      for (int64_t place = 0; place < kSplitPanels; ++place) held_keys_[place] = held_values_[place] = -1;
    }
  }

  // The keys from the split's key `first` on, a multiple of kLanes: words at a distance of kPanelTokens.
  const int32_t* keys(int64_t first) {
    const int64_t panel = first / kPanelTokens;
    return words(keys_, held_keys_, key_words_, key_dim_, panel) + first % kPanelTokens;
  }
  // The values of a panel, [kPanelTokens / kPerWord][value_dim].
  const int32_t* values(int64_t panel) { return words(values_, held_values_, value_words_, value_dim_, panel); }

  // What to fetch while a panel's keys or values are multiplied. The values follow the keys, and the next split follows
  // the values.
  FetchAhead after_keys(int64_t panel) const { return ahead_of(panel - first_); }
  FetchAhead after_values(int64_t panel) const { return ahead_of(panel - first_ + end_ - first_); }
  void set_next(const NextPanels& next) { next_ = next; }

  // The first panels of keys that a tile sees in a split; the last one is repeated.
  static NextPanels first_panels(const AttentionArgs& args, int64_t sequence, int64_t kv_head, int64_t first_position,
                                 int64_t end_position) {
    const int32_t* block_table = args.block_tables + sequence * args.block_table_stride;
    NextPanels next;
    int64_t position = first_position / kPanelTokens * kPanelTokens;
    for (int64_t i = 0; i < kAheadPanels; ++i) {
      const int64_t block = position / args.block_size, offset = position - block * args.block_size;
      const int64_t slot = (block_table[block] * args.num_kv_heads + kv_head) * args.block_size + offset;
      next.panels[i] = static_cast<const Stored*>(args.key_cache) + slot * args.key_dim;
      if (position + kPanelTokens < end_position) position += kPanelTokens;
    }
    return next;
  }

  // Scales of kLanes keys or values; those of keys that nobody sees may be anything.
  F32 key_scales(int64_t key) const { return load(key_scales_[key / kPanelTokens] + key % kPanelTokens); }
  F32 value_scales(int64_t key) const { return load(value_scales_[key / kPanelTokens] + key % kPanelTokens); }

  int64_t key_words() const { return words_of<W>(key_dim_); }
  int64_t value_dim() const { return value_dim_; }
  bool pass_once() const { return pass_once_; }

 private:
  const int32_t* words(const Stored* const* panels, int64_t* held, int32_t* memory, int64_t dim, int64_t panel) {
    if constexpr (kHoldsWords) {
      return reinterpret_cast<const int32_t*>(panels[panel]);
    } else {
      const int64_t num_elements = kPanelTokens * dim;
      const int64_t place = pass_once_ ? panel % kGroupPanels : panel;
      int32_t* to = memory + place * (num_elements / kPerWord<W>);
      if (held[place] == panel) return to;
      held[place] = panel;
      const FetchAhead ahead = panels == keys_ ? after_keys(panel) : after_values(panel);
      const Stored* from = panels[panel];
      for (int64_t i = 0; i < num_elements; i += kPerWord<W> * kLanes) {
        ahead.fetch(i * static_cast<int64_t>(sizeof(Stored)));
        if constexpr (kPerWord<W> == 2) {
          store_words(to + i / 2, rounded_pairs(load(from + i), load(from + i + kLanes)));  // bytes are bf16 exactly
        } else {
          store_words(to + i, (I32)load(from + i));
        }
      }
      return to;
    }
  }

  FetchAhead ahead_of(int64_t i) const { return {panel_at(i + kAheadPanels), panel_at(i + kAheadPanelsL1)}; }

  // Panel `i` of the split's keys, followed by its values and the next split's keys.
  const char* panel_at(int64_t i) const {
    const int64_t count = end_ - first_;
    if (i < count) return reinterpret_cast<const char*>(keys_[first_ + i]);
    if (i < 2 * count) return reinterpret_cast<const char*>(values_[first_ + i - count]);
    return static_cast<const char*>(next_.panels[min64(i - 2 * count, kAheadPanels - 1)]);
  }

  int64_t key_dim_, value_dim_;
  NextPanels next_;
  int32_t *key_words_, *value_words_;
  int64_t first_, end_;  // panels
  bool pass_once_;
  int64_t held_keys_[kSplitPanels], held_values_[kSplitPanels];  // the panels whose words are in memory
  const Stored* keys_[kSplitPanels];
  const Stored* values_[kSplitPanels];
  const float *key_scales_[kSplitPanels], *value_scales_[kSplitPanels];
};

}  // namespace shardline::SHARDLINE_ISA
