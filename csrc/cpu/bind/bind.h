#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <optional>
#include <string>

#include "bind/tensor.h"
#include "dispatch/kernels.h"

namespace shardline {

Activation activation_named(const std::string& name);

// How many columns the weight of a gated GEMM that writes num_columns has: whole panels, half of each the gate's.
inline int64_t gated_weight_columns(int64_t num_columns) {
  return (num_columns + kGatedColumns - 1) / kGatedColumns * kPanelColumns;
}

// Whether words of the KV cache, or of latents, are pairs of elements.
bool has_pairs(DType dtype);
// Checks that blocks of the cache, with `dim` elements per token and head, have the order of kv_pages.h.
void check_page_size(int64_t block_size, int64_t dim, bool pairs);

// The type of elements in a KV cache for activations of type `dtype`. With scales, it is one of bytes.
DType stored_type(const Tensor& cache, DType dtype, bool scaled);
// Checks and returns the scales of a KV cache: they have the shape of its first dimensions.
float* cache_scales(nanobind::handle object, const char* name, const Tensor& cache);

// Checks rows [num_rows, depth] as in QuantizeRowsArgs.
void check_quantized_rows(const Tensor& values, const Tensor& scales, const Tensor& sums, int64_t num_rows,
                          int64_t depth);

// The bits of the columns that may win in a GEMM with the output `best`; null if the object is None.
inline const uint64_t* allowed_columns(nanobind::handle object, const Tensor& best) {
  if (object.is_none()) return nullptr;
  const Tensor allowed(object, "allowed");
  return allowed.is(DType::kInt64).has_shape({best.size(0), best.size(2)}).is_contiguous().as<uint64_t>();
}

// Where pack_weight, pack_int8 and pack_int4 put a weight's columns: into the panels from column `first` on, or, if
// `half` is given, into the first or second half of every panel.
inline PanelColumns panel_columns(const Tensor& panels, int64_t num_columns, int64_t first,
                                  std::optional<int64_t> half) {
  if (half.has_value() && (first != 0 || *half < 0 || *half > 1)) {
    raise_value_error("half is 0 or 1, and both halves of the panels are filled from their first column on");
  }
  const int64_t width = half.has_value() ? kGatedColumns : kPanelColumns;
  const PanelColumns place = {first, half.value_or(0) * kGatedColumns, width};
  if (first < 0 || place.end_panel(num_columns) > panels.size(0)) raise_value_error("panels have too few columns");
  return place;
}

// Sets the bias of a product with num_rows rows and num_columns columns, both halves of a gated one counted: it is
// [num_columns], or [num_rows, num_columns] of float32, or [num_rows, 2, num_columns] with factors of the sums.
template <class Args>
void set_bias(Args& args, nanobind::handle object, int64_t num_rows, int64_t num_columns) {
  if (object.is_none()) return;
  const Tensor bias(object, "bias");
  if (bias.rank() == 2) {
    bias.is(DType::kFloat32).has_shape({num_rows, num_columns}).has_rows();
    args.bias_stride = bias.row_stride();
  } else if (bias.rank() == 3) {
    bias.is(DType::kFloat32).has_shape({num_rows, 2, num_columns}).has_heads();
    args.bias_stride = bias.row_stride();
    args.factors = bias.head_stride();
  } else {
    bias.is_floating().has_shape({num_columns}).is_contiguous();
  }
  args.bias = bias.data();
  args.bias_dtype = bias.dtype();
}

// Products that look for the best column take no biases of rows.
template <class Args>
void check_shared_bias(const Args& args) {
  if (args.bias_stride != 0) raise_value_error("bias must be the same for all rows");
}

// The tensors of a weight of codes; see GroupedLinearArgs.
struct GroupedTensors {
  Tensor panels;
  nanobind::handle scales, mins, zeros, table;
  int64_t group_size;
};

// num_experts -1: it is no stack of experts.
struct GroupedShape {
  int64_t num_experts, num_panels, depth;
};

// Checks the tensors and fills in what `args` says of the weight, except its panels. A table that is there stays.
void set_grouped_weight(GroupedLinearArgs& args, const GroupedShape& shape, const GroupedTensors& weight);

void bind_attention(nanobind::module_& m);
void bind_experts(nanobind::module_& m);
void bind_gemm(nanobind::module_& m);
void bind_grouped(nanobind::module_& m);
void bind_groups(nanobind::module_& m);
void bind_kv_cache(nanobind::module_& m);
void bind_linear_attention(nanobind::module_& m);
void bind_links(nanobind::module_& m);
void bind_low_rank(nanobind::module_& m);
void bind_memory(nanobind::module_& m);
void bind_mla(nanobind::module_& m);
void bind_program(nanobind::module_& m);
void bind_quantized(nanobind::module_& m);
void bind_rowwise(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_steps(nanobind::module_& m);

}  // namespace shardline
