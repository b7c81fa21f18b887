// Chains of multiply-adds over K, in fp32: the sums of a few rows times some columns of a panel of bf16 or fp32. Every
// sum is one chain in the order of K.
#pragma once

#include "gemm/gemm_tiles.h"

namespace shardline::SHARDLINE_ISA {

template <class T>
constexpr int64_t kStep = sizeof(T) == 2 ? 2 : 1;  // bf16 advances by pairs of k

inline I32 broadcast_pair(const bf16* x, bool whole) {
  uint32_t pair = x[0].bits;
  if (whole) pair |= uint32_t{x[1].bits} << 16;
  return broadcast_int(static_cast<int32_t>(pair));
}

inline I32 broadcast_pair(const bf16* x) {
  int32_t pair;
  __builtin_memcpy(&pair, x, sizeof pair);
  return broadcast_int(pair);
}

// Adds the steps [begin, end) of K to the sums; `w` points to step `begin`. Each step of bf16 has kParts panel rows,
// and a weight is the sum of its parts.
template <bool kAsk, int kParts = 1, int kRows, int kVectors>
inline void accumulate(const float* x, int64_t x_stride, const float* w, int64_t begin, int64_t end, int64_t,
                       Ahead& ahead, F32 (&sum)[kRows][kVectors]) {
  static_assert(kParts == 1, "a float needs no parts");
  for (int64_t k = begin; k < end; ++k) {
    if (kAsk) ahead.request();
    F32 column[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) column[v] = load(w + (k - begin) * kPanelColumns + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const F32 row = broadcast(x[r * x_stride + k]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sum[r][v] = fma(row, column[v], sum[r][v]);
    }
  }
}

template <bool kAsk, int kParts = 1, int kRows, int kVectors>
inline void accumulate(const bf16* x, int64_t x_stride, const bf16* w, int64_t begin, int64_t end, int64_t depth,
                       Ahead& ahead, F32 (&sum)[kRows][kVectors]) {
  const int64_t whole_end = min64(end, depth / 2);
  for (int64_t pair = begin; pair < whole_end; ++pair) {
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      if (kAsk) ahead.request();
      const bf16* step = w + ((pair - begin) * kParts + part) * 2 * kPanelColumns;
      I32 column[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) column[v] = load_pairs(step + v * kLanes * 2);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const I32 row = broadcast_pair(x + r * x_stride + pair * 2);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) sum[r][v] = dot_pairs(sum[r][v], row, column[v]);
      }
    }
  }
  if (whole_end < end) {  // an odd K ends with half a pair
    for (int part = 0; part < kParts; ++part) {
      const bf16* step = w + ((whole_end - begin) * kParts + part) * 2 * kPanelColumns;
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const I32 row = broadcast_pair(x + r * x_stride + whole_end * 2, false);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) sum[r][v] = dot_pairs(sum[r][v], row, load_pairs(step + v * kLanes * 2));
      }
    }
  }
}

// Sums [rows][64] that need no conversion, for gemm_finish.h.
template <class Args, int64_t kRowSums = kPanelColumns>
class FloatSums {
 public:
  FloatSums(const Args&, const FinishedTile& tile) : sums_(static_cast<const float*>(tile.sums)) {}

  inline auto at(int64_t c) const {
    return [sums = sums_ + c](int64_t r) { return load(sums + r * kRowSums); };
  }

 private:
  const float* const sums_;
};

}  // namespace shardline::SHARDLINE_ISA
