// Reads scales and mins of groups, as a weight stores them or expanded to float.
#pragma once

#include <vector>

#include "gemm/gemm_args.h"
#include "gemm/gemm_tiles.h"

namespace shardline::SHARDLINE_ISA {

// The scales or mins of a group.
class GroupRow {
 public:
  inline GroupRow(const GroupNumbers& numbers, int64_t num_groups, int64_t panel, int64_t g) : dtype_(numbers.dtype) {
    const char* first = static_cast<const char*>(numbers.data) + panel * numbers.panel_bytes(num_groups);
    if (dtype_ == DType::kInt8) {
      outer_ = first + (g >> numbers.outer_shift) * numbers.outer_bytes();
      const int64_t inner = g & ((int64_t{1} << numbers.outer_shift) - 1);
      row_ = outer_ + (2 + inner) * kPanelColumns;
    } else {
      row_ = first + g * kPanelColumns * static_cast<int64_t>(element_size(dtype_));
    }
  }

  [[gnu::always_inline]] inline F32 load_at(int64_t column) const {
    switch (dtype_) {
      case DType::kFloat32: return load(reinterpret_cast<const float*>(row_) + column);
      case DType::kBFloat16: return load(reinterpret_cast<const bf16*>(row_) + column);
      case DType::kInt8:
        return load_half(reinterpret_cast<const uint16_t*>(outer_) + column) *
               load(reinterpret_cast<const int8_t*>(row_) + column);
      default: return load_half(reinterpret_cast<const uint16_t*>(row_) + column);
    }
  }

  // Asks for what is `bytes` after the row.
  inline void prefetch(int64_t bytes) const {
    __builtin_prefetch(row_ + bytes);
    if (dtype_ != DType::kInt8) __builtin_prefetch(row_ + bytes + kCacheLine);
  }

 private:
  DType dtype_;
  const char* row_;
  const char* outer_ = nullptr;
};

// The scales and mins of the groups of a block of K, as float: [group][2][64]. Many tiles read them.
class BlockNumbers {
 public:
  // Expands those of the octets [begin, begin + count) of a panel.
  void expand(const GroupedLinearArgs& args, int64_t panel, int64_t begin, int64_t count) {
    const int64_t group_octets = args.group_size / kOctet, end = ceil_div(begin + count, group_octets);
    const int64_t first = begin / group_octets;
    values_.resize(static_cast<size_t>((end - first) * 2 * kPanelColumns));
    for (int64_t g = first; g < end; ++g) {
      float* to = values_.data() + (g - first) * 2 * kPanelColumns;
      expand_row(GroupRow(args.scales, args.num_groups, panel, g), to);
      if (args.mins.data != nullptr) expand_row(GroupRow(args.mins, args.num_groups, panel, g), to + kPanelColumns);
    }
  }

  // The numbers of the block's first group.
  const float* values() const { return values_.data(); }

 private:
  static void expand_row(const GroupRow& row, float* to) {
    for (int64_t column = 0; column < kPanelColumns; column += kLanes) {
      store(to + column, row.load_at(column));
    }
  }

  std::vector<float> values_;
};

// How far before its use memory of scales is asked for: a thread reads one stream of codes and some of scales, and a
// core's own prefetching ends at each page.
constexpr int64_t kAheadBytes = 1024;

// The scales and mins of group g, from the weight or expanded.
template <bool kExpanded>
class NumbersOf {
 public:
  inline NumbersOf(const GroupedLinearArgs& args, int64_t panel, int64_t g, const float*)
      : scales_(args.scales, args.num_groups, panel, g),
        mins_(args.mins.data != nullptr ? args.mins : args.scales, args.num_groups, panel, g) {}

  [[gnu::always_inline]] inline F32 scale_at(int64_t column) const { return scales_.load_at(column); }
  [[gnu::always_inline]] inline F32 min_at(int64_t column) const { return mins_.load_at(column); }
  template <bool kMins>
  inline void prefetch() const {
    scales_.prefetch(kAheadBytes);
    if (kMins) mins_.prefetch(kAheadBytes);
  }

 private:
  const GroupRow scales_, mins_;
};

template <>
class NumbersOf<true> {
 public:
  inline NumbersOf(const GroupedLinearArgs&, int64_t, int64_t, const float* expanded) : row_(expanded) {}

  inline F32 scale_at(int64_t column) const { return load(row_ + column); }
  inline F32 min_at(int64_t column) const { return load(row_ + kPanelColumns + column); }
  template <bool kMins>
  inline void prefetch() const {}

 private:
  const float* row_;
};

}  // namespace shardline::SHARDLINE_ISA
