// Python entry points of the vector kernels: check the tensors, fill in the arguments, let go of the GIL.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "bind.h"
#include "bind_checks.h"
#include "host_ops.h"
#include "kernels.h"
#include "program.h"
#include "tensor.h"

namespace shardline {
namespace {

using namespace nanobind::literals;

// num_panels -1: any.
void check_panels_shape(const Tensor& panels, int64_t num_panels, int64_t depth) {
  const bool pairs = panels.dtype() == DType::kBFloat16;
  const int64_t padded_depth = pairs ? (depth + 1) / 2 * 2 : depth;
  panels.is_floating().has_shape({num_panels, padded_depth, kPanelColumns}).is_contiguous();
  if (depth < 1) raise_value_error("a weight needs at least one input feature");
}

void check_panels(const Tensor& panels, int64_t num_columns, int64_t depth) {
  check_panels_shape(panels, (num_columns + kPanelColumns - 1) / kPanelColumns, depth);
}

void pack_weight(nb::handle weight_object, nb::handle panels_object, int64_t first, std::optional<int64_t> half) {
  const Tensor weight(weight_object, "weight"), panels(panels_object, "panels");
  weight.is_floating().has_shape({-1, -1}).has_rows().same_dtype(panels);
  check_panels_shape(panels, -1, weight.size(1));
  const PackArgs args = {weight.dtype(),
                         weight.data(),
                         weight.row_stride(),
                         panels.data(),
                         weight.size(0),
                         weight.size(1),
                         panel_columns(panels, weight.size(0), first, half)};
  nb::gil_scoped_release release;
  kernels().pack_weight(args);
}

void packed_rows_of(nb::handle panels_object, nb::handle indices_object, nb::handle out_object) {
  const Tensor panels(panels_object, "panels"), indices(indices_object, "indices"), out(out_object, "out");
  indices.is(DType::kInt64).has_shape({-1}).is_contiguous();
  out.is_floating().same_dtype(panels).has_shape({indices.size(0), -1}).is_contiguous();
  const int64_t num_panels = panels.size(0), element_bytes = out.dtype() == DType::kFloat32 ? 4 : 2;
  check_panels(panels, num_panels * kPanelColumns, out.size(1));
  for (int64_t row = 0; row < indices.size(0); ++row) {
    const int64_t index = indices.as<int64_t>()[row];
    if (index < 0 || index >= num_panels * kPanelColumns) raise_value_error("an index is outside the weight");
  }
  const PackedRowsArgs args = {panels.data(),   indices.as<int64_t>(),                 out.data(),
                               indices.size(0), panels.size(1) * element_bytes / 4, out.size(1) * element_bytes};
  nb::gil_scoped_release release;
  packed_rows(args);
}

// All but the output.
LinearArgs linear_args(const Tensor& x, const Tensor& panels, nb::handle bias_object, int64_t num_columns, bool gated) {
  x.is_floating().has_shape({-1, -1}).has_rows().same_dtype(panels);
  check_panels(panels, gated ? gated_weight_columns(num_columns) : num_columns, x.size(1));
  LinearArgs args = {};
  args.dtype = x.dtype();
  args.x = x.data();
  args.x_stride = x.row_stride();
  args.panels = panels.data();
  if (!bias_object.is_none()) {
    const Tensor bias(bias_object, "bias");
    bias.is_floating().has_shape({gated ? 2 * num_columns : num_columns}).is_contiguous();
    args.bias = bias.data();
    args.bias_dtype = bias.dtype();
  }
  args.num_rows = x.size(0);
  args.num_columns = num_columns;
  args.depth = x.size(1);
  args.gated = gated;
  return args;
}

void linear(nb::handle x_object, nb::handle panels_object, nb::handle bias_object, nb::handle out_object,
            const std::optional<std::string>& gate) {
  const Tensor x(x_object, "x"), panels(panels_object, "panels"), out(out_object, "out");
  out.is_floating().has_shape({x.size(0), -1}).has_rows();
  LinearArgs args = linear_args(x, panels, bias_object, out.size(1), gate.has_value());
  args.out_dtype = out.dtype();
  args.out = out.data();
  args.out_stride = out.row_stride();
  if (gate) args.activation = activation_named(*gate);
  perform([args] { kernels().linear(args); });
}

void linear_best(nb::handle x_object, nb::handle panels_object, nb::handle bias_object, int64_t num_columns,
                 nb::handle best_object) {
  const Tensor x(x_object, "x"), panels(panels_object, "panels"), best(best_object, "best");
  LinearArgs args = linear_args(x, panels, bias_object, num_columns, false);
  best.is(DType::kFloat32).has_shape({x.size(0), 2, panels.size(0)}).is_contiguous();
  args.out_dtype = DType::kFloat32;
  args.out = best.data();
  args.out_stride = 2 * panels.size(0);
  args.best = true;
  perform([args] { kernels().linear(args); });
}

// Where a norm's rows go: into a tensor like x, or, given three, as values, scales and sums of quantized rows.
void set_output(NormArgs& args, const Tensor& x, nb::handle out_object) {
  if (nb::isinstance<nb::tuple>(out_object)) {
    if (nb::len(out_object) != 3) raise_value_error("quantized rows are values, scales and sums");
    const Tensor values(out_object[0], "values"), scales(out_object[1], "scales"), sums(out_object[2], "sums");
    x.has_shape({-1, -1});
    check_quantized_rows(values, scales, sums, args.num_rows, args.width);
    args.values = values.as<int8_t>();
    args.scales = scales.as<float>();
    args.sums = sums.as<int32_t>();
    return;
  }
  const Tensor out(out_object, "out");
  out.same_dtype(x).is_contiguous();
  if (x.rank() == 3) {
    out.has_shape({x.size(0), x.size(1), args.width});
  } else {
    out.has_shape({x.size(0), args.width});
  }
  args.out = out.data();
}

NormArgs norm_args(const Tensor& x, const Tensor& weight, nb::handle out, float eps) {
  const bool heads = x.rank() == 3;  // [num_tokens, num_heads, head_dim]
  if (heads) {
    x.has_shape({-1, -1, -1});
  } else {
    x.has_shape({-1, -1});
  }
  x.is_floating().has_rows();
  NormArgs args = {};
  args.dtype = x.dtype();
  args.x = x.data();
  args.x_stride = x.row_stride();
  args.rows_per_token = heads ? x.size(1) : 1;
  args.num_rows = x.size(0) * args.rows_per_token;
  args.width = x.size(x.rank() - 1);
  args.eps = eps;
  args.weight = weight.same_dtype(x).has_shape({args.width}).is_contiguous().data();
  set_output(args, x, out);
  return args;
}

void set_residual(NormArgs& args, const Tensor& x, nb::handle residual_object, nb::handle summed_object) {
  if (residual_object.is_none()) return;
  const Tensor residual(residual_object, "residual"), summed(summed_object, "summed");
  residual.same_dtype(x).has_shape({x.size(0), x.size(1)}).has_rows();
  summed.same_dtype(x).has_shape({x.size(0), x.size(1)}).is_contiguous();
  args.residual = residual.data();
  args.residual_stride = residual.row_stride();
  args.summed = summed.data();
}

void rms_norm(nb::handle x_object, nb::handle weight_object, nb::handle out, float eps, float weight_offset,
              nb::handle residual, nb::handle summed) {
  const Tensor x(x_object, "x");
  NormArgs args = norm_args(x, Tensor(weight_object, "weight"), out, eps);
  args.weight_offset = weight_offset;
  set_residual(args, x, residual, summed);
  perform([args] { kernels().rms_norm(args); });
}

void layer_norm(nb::handle x_object, nb::handle weight_object, nb::handle bias_object, nb::handle out, float eps,
                nb::handle residual, nb::handle summed) {
  const Tensor x(x_object, "x");
  NormArgs args = norm_args(x, Tensor(weight_object, "weight"), out, eps);
  if (!bias_object.is_none()) {
    const Tensor bias(bias_object, "bias");
    args.bias = bias.same_dtype(x).has_shape({args.width}).is_contiguous().data();
  }
  set_residual(args, x, residual, summed);
  perform([args] { kernels().layer_norm(args); });
}

void add(nb::handle x_object, nb::handle y_object, nb::handle out_object) {
  const Tensor x(x_object, "x"), y(y_object, "y"), out(out_object, "out");
  x.is_floating().has_shape({-1, -1}).is_contiguous();
  y.same_dtype(x).has_shape({x.size(0), x.size(1)}).is_contiguous();
  out.same_dtype(x).has_shape({x.size(0), x.size(1)}).is_contiguous();
  const AddArgs args = {x.dtype(), x.data(), y.data(), out.data(), x.num_elements()};
  perform([args] { kernels().add(args); });
}

}  // namespace

Activation activation_named(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "gelu") return Activation::kGelu;
  if (name == "relu") return Activation::kRelu;
  raise_value_error("unknown activation '" + name + "'; known: silu, gelu_tanh, gelu, relu");
}

namespace {

void activation(nb::handle x_object, nb::handle out_object, const std::string& name, bool gated) {
  const Tensor x(x_object, "x"), out(out_object, "out");
  x.is_floating().has_shape({-1, -1}).has_rows();
  out.same_dtype(x).has_shape({x.size(0), gated ? x.size(1) / 2 : x.size(1)}).is_contiguous();
  if (gated && x.size(1) % 2 != 0) raise_value_error("gate_up must have an even width");
  const ActivationArgs args = {x.dtype(), activation_named(name), x.data(), x.row_stride(), out.data(),
                               x.size(0), out.size(1), gated};
  perform([args] { kernels().activation(args); });
}

void softcap(nb::handle logits_object, float cap) {
  const Tensor logits(logits_object, "logits");
  logits.is(DType::kFloat32).is_contiguous();
  perform([data = logits.as<float>(), count = logits.num_elements(), cap] { kernels().softcap(data, count, cap); });
}

void paged_attention(nb::handle query_object, nb::handle key_cache_object, nb::handle value_cache_object,
                     nb::handle block_tables_object, nb::handle query_starts_object, nb::handle context_lens_object,
                     nb::handle out_object, float scale, std::optional<int64_t> window, std::optional<float> softcap,
                     nb::handle key_scales_object, nb::handle value_scales_object) {
  const Tensor query(query_object, "query"), out(out_object, "out");
  const Tensor key_cache(key_cache_object, "key_cache"), value_cache(value_cache_object, "value_cache");
  const Tensor block_tables(block_tables_object, "block_tables"), query_starts(query_starts_object, "query_starts");
  const Tensor context_lens(context_lens_object, "context_lens");
  query.is_floating().has_shape({-1, -1, -1}).has_rows();
  const bool scaled = !key_scales_object.is_none();
  for (const Tensor* cache : {&key_cache, &value_cache}) scaled ? cache->is(DType::kInt8) : cache->same_dtype(query);
  key_cache.has_shape({-1, -1, -1, query.size(2)}).is_contiguous();
  value_cache.has_shape({key_cache.size(0), key_cache.size(1), key_cache.size(2), -1})
      .is_contiguous();
  out.same_dtype(query).has_shape({query.size(0), query.size(1), value_cache.size(3)}).is_contiguous();
  context_lens.is(DType::kInt32).has_shape({-1}).is_contiguous();
  block_tables.is(DType::kInt32).has_shape({context_lens.size(0), -1}).has_rows();
  query_starts.is(DType::kInt32).has_shape({context_lens.size(0) + 1}).is_contiguous();
  if (key_cache.size(1) == 0 || query.size(1) % key_cache.size(1) != 0) {
    raise_value_error("the number of query heads must be a multiple of the number of KV heads");
  }
  if (!(scale > 0)) raise_value_error("scale must be positive");
  if (window && *window < 1) raise_value_error("window must be at least 1, or None");
  AttentionArgs args = {query.dtype(), query.data(), query.row_stride(), key_cache.data(), value_cache.data(),
                              block_tables.as<int32_t>(), block_tables.row_stride(), query_starts.as<int32_t>(),
                              context_lens.as<int32_t>(), out.data(), context_lens.size(0), query.size(1),
                              key_cache.size(1), query.size(2), value_cache.size(3), key_cache.size(2),
                              window.value_or(0), scale, softcap.value_or(0.0f), nullptr, nullptr};
  if (scaled) {
    args.key_scales = cache_scales(key_scales_object, "key_scales", key_cache);
    args.value_scales = cache_scales(value_scales_object, "value_scales", value_cache);
  }
  perform([args, num_tokens = query.size(0), max_blocks = block_tables.size(1), num_blocks = key_cache.size(0)] {
    check_sequences(args, args.window, num_tokens, max_blocks, num_blocks);
    kernels().paged_attention(args);
  });
}

}  // namespace

void bind_ops(nb::module_& m) {
  m.def("pack_weight", &pack_weight, "weight"_a, "panels"_a, "first"_a = 0, "half"_a = nb::none());
  m.def("linear", &linear, "x"_a, "panels"_a, "bias"_a.none(), "out"_a, "gate"_a = nb::none());
  m.def("packed_rows", &packed_rows_of, "panels"_a, "indices"_a, "out"_a);
  m.def("linear_best", &linear_best, "x"_a, "panels"_a, "bias"_a.none(), "num_columns"_a, "best"_a);
  m.def("rms_norm", &rms_norm, "x"_a, "weight"_a, "out"_a, "eps"_a, "weight_offset"_a, "residual"_a.none(),
        "summed"_a.none());
  m.def("layer_norm", &layer_norm, "x"_a, "weight"_a, "bias"_a.none(), "out"_a, "eps"_a, "residual"_a.none(),
        "summed"_a.none());
  m.def("add", &add, "x"_a, "y"_a, "out"_a);
  m.def("activation", &activation, "x"_a, "out"_a, "name"_a, "gated"_a);
  m.def("softcap", &softcap, "logits"_a, "cap"_a);
  m.def("paged_attention", &paged_attention, "query"_a, "key_cache"_a, "value_cache"_a, "block_tables"_a,
        "query_starts"_a, "context_lens"_a, "out"_a, "scale"_a, "window"_a.none(), "softcap"_a.none(),
        "key_scales"_a.none(), "value_scales"_a.none());
}

}  // namespace shardline
