// Python entry points of the kernels over quantized rows and weights.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "bind/bind.h"
#include "bind/tensor.h"
#include "dispatch/kernels.h"
#include "runtime/program.h"

namespace shardline {
namespace {

using namespace nanobind::literals;

int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// Up to this depth sums of products of bytes stay within int32, offsets included: 128 * 127 * 2^17 < 2^31.
void check_depth(int64_t depth) {
  constexpr int64_t kMaxDepth = 1 << 17;
  if (depth < 1 || depth > kMaxDepth) {
    raise_value_error("a quantized weight takes 1 to " + std::to_string(kMaxDepth) + " input features, not " +
                      std::to_string(depth));
  }
}

// The panels and scales of a weight, with the types that the kernels take.
struct Weight {
  uint8_t* panels;
  float* scales;
};

// num_panels -1 stands for any number.
Weight int8_panels(nb::handle panels_object, nb::handle scales_object, int64_t num_panels, int64_t depth) {
  const Tensor panels(panels_object, "panels"), scales(scales_object, "column_scales");
  check_depth(depth);
  panels.is(DType::kUInt8)
      .has_shape({num_panels, round_up(depth, kQuad) / kQuad, kPanelColumns, kQuad})
      .is_contiguous();
  scales.is(DType::kFloat32).has_shape({panels.size(0) * kPanelColumns}).is_contiguous();
  return {panels.as<uint8_t>(), scales.as<float>()};
}

Weight int8_weight(nb::handle panels, nb::handle scales, int64_t num_columns, int64_t depth) {
  return int8_panels(panels, scales, round_up(num_columns, kPanelColumns) / kPanelColumns, depth);
}

Weight int4_panels(nb::handle panels_object, nb::handle scales_object, int64_t num_panels, int64_t depth) {
  const Tensor panels(panels_object, "panels"), scales(scales_object, "column_scales");
  check_depth(depth);
  panels.is(DType::kUInt8)
      .has_shape({num_panels, round_up(depth, kGroupDepth) / kGroupDepth, kInt4GroupBytes})
      .is_contiguous();
  scales.is(DType::kFloat32).has_shape({panels.size(0) * kPanelColumns}).is_contiguous();
  return {panels.as<uint8_t>(), scales.as<float>()};
}

Weight int4_weight(nb::handle panels, nb::handle scales, int64_t num_columns, int64_t depth) {
  return int4_panels(panels, scales, round_up(num_columns, kPanelColumns) / kPanelColumns, depth);
}

template <bool kRotated>
void quantize_rows(nb::handle x_object, nb::handle values_object, nb::handle scales_object, nb::handle sums_object) {
  const Tensor x(x_object, "x"), values(values_object, "values"), scales(scales_object, "scales");
  const Tensor sums(sums_object, "sums");
  x.is_floating().has_shape({-1, -1}).has_rows();
  check_quantized_rows(values, scales, sums, x.size(0), x.size(1));
  const QuantizeRowsArgs args = {x.dtype(),           x.data(),           x.row_stride(),
                                 values.as<int8_t>(), scales.as<float>(), sums.as<int32_t>(),
                                 x.size(0),           x.size(1),          kRotated};
  perform([args] { kernels().quantize_rows(args); });
}

using CheckPanels = Weight(nb::handle, nb::handle, int64_t, int64_t);

PackQuantizedArgs pack_args(nb::handle weight_object, nb::handle panels, nb::handle scales, int64_t first,
                            std::optional<int64_t> half, CheckPanels* checked) {
  const Tensor weight(weight_object, "weight");
  weight.is_floating().has_shape({-1, -1}).has_rows();
  const Weight to = checked(panels, scales, -1, weight.size(1));
  const PanelColumns place = panel_columns(Tensor(panels, "panels"), weight.size(0), first, half);
  return {weight.dtype(), weight.data(), weight.row_stride(), to.panels, to.scales, weight.size(0), weight.size(1),
          place,          false};
}

void pack_int8(nb::handle weight, nb::handle panels, nb::handle scales, int64_t first, std::optional<int64_t> half,
               bool rotated) {
  PackQuantizedArgs args = pack_args(weight, panels, scales, first, half, int8_panels);
  args.rotated = rotated;
  nb::gil_scoped_release release;
  kernels().pack_int8(args);
}

void pack_int4(nb::handle weight, nb::handle panels, nb::handle scales, int64_t first, std::optional<int64_t> half) {
  const PackQuantizedArgs args = pack_args(weight, panels, scales, first, half, int4_panels);
  nb::gil_scoped_release release;
  kernels().pack_int4(args);
}

// Fills in all arguments except the weight and the output.
QuantizedLinearArgs linear_args(nb::handle values_object, nb::handle scales_object, nb::handle sums_object,
                                int64_t depth, nb::handle bias_object, int64_t num_columns, bool gated) {
  const Tensor values(values_object, "values"), scales(scales_object, "scales"), sums(sums_object, "sums");
  check_quantized_rows(values, scales, sums, values.size(0), depth);
  QuantizedLinearArgs args = {};
  args.x = values.as<int8_t>();
  args.row_scales = scales.as<float>();
  args.row_sums = sums.as<int32_t>();
  set_bias(args, bias_object, values.size(0), gated ? 2 * num_columns : num_columns);
  args.num_rows = values.size(0);
  args.num_columns = num_columns;
  args.depth = depth;
  args.gated = gated;
  return args;
}

// Fills in all arguments except the weight.
QuantizedLinearArgs linear_args(nb::handle values, nb::handle scales, nb::handle sums, int64_t depth, nb::handle bias,
                                nb::handle out_object, const std::optional<std::string>& gate) {
  const Tensor out(out_object, "out");
  out.is_floating().has_shape({-1, -1}).has_rows();
  QuantizedLinearArgs args = linear_args(values, scales, sums, depth, bias, out.size(1), gate.has_value());
  out.has_shape({args.num_rows, -1});
  args.out_dtype = out.dtype();
  args.out = out.data();
  args.out_stride = out.row_stride();
  if (gate) args.activation = activation_named(*gate);
  return args;
}

using CheckWeight = Weight(nb::handle, nb::handle, int64_t, int64_t);

void set_weight(QuantizedLinearArgs& args, nb::handle panels, nb::handle scales, CheckWeight* packed) {
  const int64_t num_columns = args.gated ? gated_weight_columns(args.num_columns) : args.num_columns;
  const Weight weight = packed(panels, scales, num_columns, args.depth);
  args.panels = weight.panels;
  args.column_scales = weight.scales;
}

void linear_int8(nb::handle values, nb::handle scales, nb::handle sums, int64_t depth, nb::handle panels,
                 nb::handle column_scales, nb::handle bias, nb::handle out, const std::optional<std::string>& gate) {
  QuantizedLinearArgs args = linear_args(values, scales, sums, depth, bias, out, gate);
  set_weight(args, panels, column_scales, int8_weight);
  perform([args] { kernels().linear_int8(args); });
}

void linear_int8_best(nb::handle values, nb::handle scales, nb::handle sums, int64_t depth, nb::handle panels,
                      nb::handle column_scales, nb::handle bias, int64_t num_columns, nb::handle allowed,
                      nb::handle best_object) {
  QuantizedLinearArgs args = linear_args(values, scales, sums, depth, bias, num_columns, false);
  set_weight(args, panels, column_scales, int8_weight);
  const Tensor best(best_object, "best");
  const int64_t num_panels = round_up(num_columns, kPanelColumns) / kPanelColumns;
  best.is(DType::kFloat32).has_shape({args.num_rows, 2, num_panels}).is_contiguous();
  args.out_dtype = DType::kFloat32;
  args.out = best.data();
  args.out_stride = 2 * num_panels;
  check_shared_bias(args);
  args.best = true;
  args.allowed = allowed_columns(allowed, best);
  perform([args] { kernels().linear_int8(args); });
}

void linear_int4(nb::handle values, nb::handle scales, nb::handle sums, int64_t depth, nb::handle panels,
                 nb::handle column_scales, nb::handle bias, nb::handle out, const std::optional<std::string>& gate) {
  QuantizedLinearArgs args = linear_args(values, scales, sums, depth, bias, out, gate);
  set_weight(args, panels, column_scales, int4_weight);
  perform([args] { kernels().linear_int4(args); });
}

// Checks a dense weight, its codes and the number of groups of a row, which is returned.
int64_t check_codes(const Tensor& weight, const Tensor& codes) {
  weight.is_floating().has_shape({-1, -1}).has_rows();
  check_depth(weight.size(1));
  codes.is(DType::kUInt8).has_shape({weight.size(0), weight.size(1)}).is_contiguous();
  return round_up(weight.size(1), kGroupDepth) / kGroupDepth;
}

void quantize_nibbles(nb::handle weight_object, nb::handle codes_object, nb::handle scales_object,
                      nb::handle outer_scales_object, nb::handle mins_object, nb::handle outer_mins_object) {
  const Tensor weight(weight_object, "weight"), codes(codes_object, "codes"), scales(scales_object, "scales");
  const Tensor outer_scales(outer_scales_object, "outer_scales"), mins(mins_object, "mins");
  const Tensor outer_mins(outer_mins_object, "outer_mins");
  const int64_t num_groups = check_codes(weight, codes), rows = weight.size(0);
  for (const Tensor* inner : {&scales, &mins}) inner->is(DType::kInt8).has_shape({rows, num_groups}).is_contiguous();
  outer_scales.has_shape({rows, -1});
  const int64_t num_outer = outer_scales.size(1);
  for (const Tensor* outer : {&outer_scales, &outer_mins}) {
    outer->is(DType::kFloat16).has_shape({rows, num_outer}).is_contiguous();
  }
  if (num_outer < 1 || num_groups % num_outer != 0 || num_groups / num_outer > kMostOuterGroups) {
    raise_value_error("1 to " + std::to_string(kMostOuterGroups) + " groups share their outer numbers");
  }
  const QuantizeNibblesArgs args = {weight.dtype(),
                                    weight.data(),
                                    weight.row_stride(),
                                    codes.as<uint8_t>(),
                                    scales.as<int8_t>(),
                                    mins.as<int8_t>(),
                                    outer_scales.as<uint16_t>(),
                                    outer_mins.as<uint16_t>(),
                                    rows,
                                    weight.size(1),
                                    num_groups / num_outer};
  nb::gil_scoped_release release;
  kernels().quantize_nibbles(args);
}

void quantize_bytes(nb::handle weight_object, nb::handle codes_object, nb::handle scales_object) {
  const Tensor weight(weight_object, "weight"), codes(codes_object, "codes"), scales(scales_object, "scales");
  const int64_t num_groups = check_codes(weight, codes);
  scales.is(DType::kBFloat16).has_shape({weight.size(0), num_groups}).is_contiguous();
  const QuantizeBytesArgs args = {weight.dtype(),    weight.data(),  weight.row_stride(), codes.as<uint8_t>(),
                                  scales.as<bf16>(), weight.size(0), weight.size(1)};
  nb::gil_scoped_release release;
  kernels().quantize_bytes(args);
}

}  // namespace

void check_quantized_rows(const Tensor& values, const Tensor& scales, const Tensor& sums, int64_t num_rows,
                          int64_t depth) {
  check_depth(depth);
  const int64_t padded_depth = round_up(depth, kGroupDepth);
  values.is(DType::kInt8).has_shape({num_rows, padded_depth}).is_contiguous();
  scales.is(DType::kFloat32).has_shape({num_rows}).is_contiguous();
  sums.is(DType::kInt32).has_shape({num_rows, 1 + padded_depth / kGroupDepth}).is_contiguous();
}

void bind_quantized(nb::module_& m) {
  m.def("quantize_rows", &quantize_rows<false>, "x"_a, "values"_a, "scales"_a, "sums"_a);
  m.def("quantize_rotated", &quantize_rows<true>, "x"_a, "values"_a, "scales"_a, "sums"_a);
  m.def("pack_int8", &pack_int8, "weight"_a, "panels"_a, "scales"_a, "first"_a = 0, "half"_a = nb::none(),
        "rotated"_a = false);
  m.def("pack_int4", &pack_int4, "weight"_a, "panels"_a, "scales"_a, "first"_a = 0, "half"_a = nb::none());
  m.def("linear_int8", &linear_int8, "values"_a, "scales"_a, "sums"_a, "depth"_a, "panels"_a, "column_scales"_a,
        "bias"_a.none(), "out"_a, "gate"_a = nb::none());
  m.def("linear_int8_best", &linear_int8_best, "values"_a, "scales"_a, "sums"_a, "depth"_a, "panels"_a,
        "column_scales"_a, "bias"_a.none(), "num_columns"_a, "allowed"_a.none(), "best"_a);
  m.def("quantize_nibbles", &quantize_nibbles, "weight"_a, "codes"_a, "scales"_a, "outer_scales"_a, "mins"_a,
        "outer_mins"_a);
  m.def("quantize_bytes", &quantize_bytes, "weight"_a, "codes"_a, "scales"_a);
  m.def("linear_int4", &linear_int4, "values"_a, "scales"_a, "sums"_a, "depth"_a, "panels"_a, "column_scales"_a,
        "bias"_a.none(), "out"_a, "gate"_a = nb::none());
}

}  // namespace shardline
