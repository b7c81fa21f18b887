// Arguments of the products with adapters (LoRA): what the adapter of each row adds to the outputs of a linear.
#pragma once

#include "runtime/types.h"

namespace shardline {

// Ranks are computed in blocks of so many, on every ISA.
constexpr int64_t kRankBlock = 16;
// Rows of the same adapter that share its weights while they are in registers.
constexpr int64_t kAdapterRows = 4;

// out[row] = bias + factors * scale * (x[row] down^T) up^T, with the weights of the row's adapter.
//
// The factors are also written, for the product that adds `out` to its sums: it multiplies these with them.
// A linear may stack several parts, such as q, k and v: each has its own columns of `out`, and its own down and up.
struct LowRankArgs {
  DType dtype, bias_dtype;
  const void* x;
  int64_t x_stride;
  const int32_t* x_rows;  // [num_rows]: the row of x of each row; null: they are in order
  const int32_t* slots;   // [num_rows]: the adapter of each row; negative: none
  const void* down;       // [num_slots][num_parts][rank_blocks][depth / step][16][step], step 2 for bf16, else 1
  const void* up;         // [num_slots], and for each part [max_rank][its columns]
  const int32_t* ranks;   // [num_slots][num_parts]; 0: the adapter leaves this part alone
  const float* scales;    // [num_slots][num_parts]
  const float* factors;   // [num_slots][num_columns]; null: all are 1, and none is written
  const int32_t* scaled;  // [num_slots][num_parts]: whether `factors` has those of the part; else they are 1
  const int64_t* bounds;  // [num_parts + 1]: the columns of each part
  const void* bias;       // [rows of the bias][num_columns] or null
  const int32_t* biases;  // [num_rows]: the row of the bias of each row; null: all have the first one
  float* hidden;          // scratch, [num_rows][num_parts][rank_blocks][16]
  int32_t* order;         // scratch, num_slots + num_rows * (kAdapterRows + 3)
  float* out;             // [num_rows][num_columns], or [num_rows][2][num_columns] with the factors behind
  int64_t num_rows, num_columns, depth, num_slots, num_parts, max_rank;

  int64_t rank_blocks() const { return (max_rank + kRankBlock - 1) / kRankBlock; }
  int64_t rank(int64_t slot, int64_t part) const { return ranks[slot * num_parts + part]; }
  // [max_rank][the part's columns]
  template <class T>
  const T* up_of(int64_t slot, int64_t part) const {
    return static_cast<const T*>(up) + max_rank * (slot * num_columns + bounds[part]);
  }
  int64_t out_stride() const { return factors == nullptr ? num_columns : 2 * num_columns; }
};

}  // namespace shardline
