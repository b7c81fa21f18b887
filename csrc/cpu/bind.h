#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "kernels.h"
#include "tensor.h"

namespace shardline {

Activation activation_named(const std::string& name);

// Columns of the weight of a gated GEMM that writes num_columns: of whole panels, half of each the gate's.
inline int64_t gated_weight_columns(int64_t num_columns) {
  return (num_columns + kGatedColumns - 1) / kGatedColumns * kPanelColumns;
}

// The scales of an int8 KV cache, checked.
float* cache_scales(nanobind::handle object, const char* name, const Tensor& cache);

// Rows [num_rows, depth] as in QuantizeRowsArgs.
void check_quantized_rows(const Tensor& values, const Tensor& scales, const Tensor& sums, int64_t num_rows,
                          int64_t depth);

void bind_experts(nanobind::module_& m);
void bind_kv_cache(nanobind::module_& m);
void bind_mla(nanobind::module_& m);
void bind_ops(nanobind::module_& m);
void bind_program(nanobind::module_& m);
void bind_quantized(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_shared(nanobind::module_& m);

}  // namespace shardline
