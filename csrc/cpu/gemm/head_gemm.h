// One product per head, made of calls of the GEMM.
#pragma once

#include "runtime/types.h"

namespace shardline {

// One linear per head: x[:, h] times weight h.
struct HeadLinearArgs {
  DType dtype;
  const void* x;  // [num_tokens, num_heads, depth]
  int64_t x_stride, x_head_stride;
  const void* panels;  // [num_heads] weights as in PackArgs
  void* out;           // [num_tokens, num_heads, num_columns]
  int64_t out_stride, out_head_stride;
  int64_t num_tokens, num_heads, num_columns, depth;
};
void linear_heads(const HeadLinearArgs& args);

}  // namespace shardline
