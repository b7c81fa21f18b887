// Arguments of the sum over a token's experts.
#pragma once

#include "runtime/types.h"

namespace shardline {

// out[t] = sum over slots of weights[t][slot] * rows[places[t][slot]], then + shared_scale[t] * shared[t].
struct CombineArgs {
  DType rows_dtype, shared_dtype, out_dtype;
  const void* rows;       // [.., width], contiguous
  const int32_t* places;  // [num_tokens, num_slots]; negative: the slot is left out
  const float* weights;   // [num_tokens, num_slots]
  const void* shared;     // [num_tokens, width] or null
  int64_t shared_stride;
  const float* shared_scale;  // [num_tokens], or null for one
  void* out;                  // [num_tokens, width]
  int64_t out_stride, num_tokens, num_slots, width;
};

}  // namespace shardline
