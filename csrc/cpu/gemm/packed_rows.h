// Reads rows back from a packed weight. It only moves memory, so it exists once for all ISAs.
#pragma once

#include "runtime/types.h"

namespace shardline {

// The rows of a packed weight, as they were before packing. A step of a panel has 4 bytes per column: a pair of bf16,
// or a float.
struct PackedRowsArgs {
  const void* panels;  // [num_panels][num_steps][64][4 bytes]
  const int64_t* indices;
  void* out;  // [num_rows][row_bytes]
  int64_t num_rows, num_steps, row_bytes;
};
void packed_rows(const PackedRowsArgs& args);

// Rows of codes that pack_codes packed; see gemm_args.h.
struct PackedCodesArgs {
  const uint8_t* panels;
  const int64_t* indices;
  uint8_t* codes;  // [num_rows, depth]
  int64_t num_rows, depth, bits;
};
void packed_codes(const PackedCodesArgs& args);

}  // namespace shardline
