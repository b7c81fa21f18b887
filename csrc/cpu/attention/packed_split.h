// The keys and values of one split, packed as the rows of a tile need them.
#pragma once

#include "attention/attention_operands.h"

namespace shardline::SHARDLINE_ISA {

constexpr int64_t kGroupKeys = 64;  // keys that are packed, and scored, together

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

// The keys of one split that a tile can see, and their packed copies. A group is packed when a row first needs it: a
// single row then still finds it in L1. The cache holds elements of type Stored, bytes with their scales among them.
template <class W, class Stored>
class PackedSplit {
 public:
  static constexpr bool kScaled = sizeof(Stored) == 1;
  static constexpr int64_t kNumGroups = kSplitKeys / kGroupKeys;

  static int64_t key_words(int64_t dim) { return whole_vectors(words_of<W>(dim)); }
  static size_t scratch_words(int64_t key_dim, int64_t value_dim) {
    return static_cast<size_t>(kSplitKeys * key_words(key_dim) + words_of<W>(kSplitKeys) * whole_vectors(value_dim));
  }

  void prepare(int32_t* memory, int64_t key_dim, int64_t value_dim) {
    key_dim_ = key_dim;
    value_dim_ = value_dim;
    packed_keys_ = memory;
    packed_values_ = memory + kSplitKeys * key_words(key_dim);
  }

  // Starts another split. The tile sees the keys `known`, counted from the split's first; set() names them next. Unless
  // groups are kept, each is packed into the place of the one before. That keeps the copies in L1 when rows pass once.
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
      pack_keys<W>(keys, key_dim_, packed + (first - group * kGroupKeys) * key_words(key_dim_));
    }
    return packed;
  }

  // The values' words from the group's first, [words of a group][value_width].
  const int32_t* value_group(int64_t group) {
    int32_t* packed = packed_values_ + (keep_groups_ ? words_of<W>(group * kGroupKeys) * value_width() : 0);
    if (has_values_[group]) return packed;
    claim(has_values_, group);
    int32_t* row = packed;
    for (int64_t key = group * kGroupKeys; key < min64((group + 1) * kGroupKeys, known_.end); key += kPerWord<W>) {
      const Stored* values[2] = {values_[nearest_known(key)], values_[nearest_known(key + 1)]};
      if (key % kLanes == 0) fetch_until(known_.end - known_.begin + key + kLanes - known_.begin + kFetchAhead);
      pack_values<W>(values, value_dim_, row);
      row += value_width();
    }
    return packed;
  }

  bool has_values(int64_t group) const { return has_values_[group]; }

  // Scales of kLanes keys or values; those of keys that nobody sees may be anything.
  F32 key_scales(int64_t place) const { return load(key_scales_ + place); }
  F32 value_scales(int64_t place) const { return load(value_scales_ + place); }

  int64_t key_words() const { return words_of<W>(key_dim_); }
  int64_t panel_words() const { return key_words(key_dim_) * kLanes; }
  int64_t value_width() const { return whole_vectors(value_dim_); }

 private:
  // How many rows are fetched ahead: blocks lie anywhere in memory, so the hardware cannot guess the next one.
  static constexpr int64_t kFetchAhead = 64;

  int64_t nearest_known(int64_t key) const { return max64(known_.begin, min64(key, known_.end - 1)); }

  void claim(bool (&has)[kNumGroups], int64_t group) {
    if (!keep_groups_) {
      for (int64_t g = 0; g < kNumGroups; ++g) has[g] = false;
    }
    has[group] = true;
  }

  // Asks for the first `count` rows of the known keys followed by the known values.
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
