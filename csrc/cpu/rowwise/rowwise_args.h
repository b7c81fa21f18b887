// Arguments of the kernels that compute each row by itself: norms, sums, activations.
//
// "Rows" are row-major with contiguous elements in a row; a stride counts elements between rows.
#pragma once

#include "runtime/types.h"

namespace shardline {

enum class Activation : uint8_t { kSilu, kGeluTanh, kGelu, kRelu, kRelu2, kClampedSwish };

struct NormArgs {
  DType dtype;
  const void* x;  // the rows of a token are head_stride apart, and tokens x_stride
  int64_t x_stride, head_stride, rows_per_token;
  const void* residual;  // null: normalise x alone
  int64_t residual_stride;
  void* summed;        // x + residual, contiguous
  const void* weight;  // [width]
  const void* bias;    // [width] or null; layer_norm only
  void* out;           // contiguous; null: the rows are quantized instead, see QuantizeRowsArgs
  int8_t* values;
  float* scales;
  int32_t* sums;
  int64_t num_rows, width;
  float eps;
  float weight_offset;  // rms_norm only
};

struct AddArgs {
  DType dtype;
  const void *x, *y;
  void* out;
  int64_t count;
};

// out [num_rows, width] = x * factor of the row, rounded once; contiguous.
struct ScaleRowsArgs {
  DType dtype;
  const void* x;
  int64_t x_stride;
  const float* factors;   // of rows, or of positions
  int64_t num_factors;    // one factor is for all rows
  const void* positions;  // [num_rows] or null
  bool positions_are_int64;
  void* out;
  int64_t out_stride;
  int64_t num_rows, width;
};

// x = x * sigmoid(gate), for heads; the sigmoid is rounded before the product, as in eager torch.
struct GateHeadsArgs {
  DType dtype;
  void* x;           // [num_tokens, num_heads, head_dim], contiguous
  const void* gate;  // the same shape
  int64_t gate_stride, gate_head_stride;
  int64_t num_tokens, num_heads, head_dim;
};

struct ActivationArgs {
  DType dtype;
  Activation activation;
  const void* x;  // [num_rows, width], or [num_rows, 2 * width] if gated
  int64_t x_stride;
  void* out;  // [num_rows, width], contiguous
  int64_t num_rows, width;
  bool gated;
};

}  // namespace shardline
