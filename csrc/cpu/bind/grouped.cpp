// Python entry points of the products with codes that share scales in groups.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <optional>
#include <string>

#include "bind/bind.h"
#include "bind/tensor.h"
#include "dispatch/kernels.h"
#include "runtime/program.h"

namespace shardline {
namespace {

using namespace nanobind::literals;

int64_t ceil_div(int64_t count, int64_t unit) { return (count + unit - 1) / unit; }

// Checks panels [num_panels, octets, bytes of an octet] and returns the bits of a code; num_panels -1 stands for any
// number.
int64_t check_code_panels(const Tensor& panels, int64_t num_panels, int64_t depth) {
  panels.is(DType::kUInt8).has_shape({num_panels, ceil_div(depth, kOctet), -1}).is_contiguous();
  if (depth < 1) raise_value_error("a weight needs at least one input feature");
  for (const int64_t bits : {4, 8}) {
    if (panels.size(2) == octet_bytes(bits)) return bits;
  }
  raise_value_error("an octet of panels has " + std::to_string(octet_bytes(4)) + " or " +
                    std::to_string(octet_bytes(8)) + " bytes, not " + std::to_string(panels.size(2)));
}

void pack_codes_of(nb::handle codes_object, nb::handle panels_object, int64_t first, std::optional<int64_t> half) {
  const Tensor codes(codes_object, "codes"), panels(panels_object, "panels");
  codes.is(DType::kUInt8).has_shape({-1, -1}).has_rows();
  const int64_t bits = check_code_panels(panels, -1, codes.size(1));
  const PackCodesArgs args = {codes.as<uint8_t>(), codes.row_stride(), panels.as<uint8_t>(),
                              bits,                codes.size(0),      codes.size(1),
                              panel_columns(panels, codes.size(0), first, half)};
  nb::gil_scoped_release release;
  pack_codes(args);
}

// The tensors of a weight; see GroupedLinearArgs.
struct Weight {
  nb::handle panels, scales, mins, zeros, table;
  int64_t group_size;
};

void set_weight(GroupedLinearArgs& args, const Weight& weight) {
  const Tensor panels(weight.panels, "panels"), scales(weight.scales, "scales");
  const int64_t num_columns = args.gated ? gated_weight_columns(args.num_columns) : args.num_columns;
  const int64_t num_panels = ceil_div(num_columns, kPanelColumns);
  if (weight.group_size < 1 || weight.group_size % kOctet != 0) {
    raise_value_error("a group has a multiple of 8 columns, not " + std::to_string(weight.group_size));
  }
  args.bits = check_code_panels(panels, num_panels, args.depth);
  args.panels = panels.as<uint8_t>();
  args.group_size = weight.group_size;
  const auto shape = {num_panels, args.num_groups(), kPanelColumns};
  scales.has_shape(shape).is_contiguous();
  if (scales.dtype() != DType::kFloat16) scales.is_floating();
  args.scales = scales.data();
  args.scale_dtype = scales.dtype();
  if (!weight.mins.is_none()) {
    args.mins = Tensor(weight.mins, "mins").is(DType::kFloat32).has_shape(shape).is_contiguous().as<float>();
  }
  if (weight.zeros.is_none()) {
    const Tensor table(weight.table, "table");
    args.table = table.is(DType::kFloat32).has_shape({int64_t{1} << args.bits}).is_contiguous().as<float>();
    return;
  }
  if (args.bits != 4) raise_value_error("only codes of 4 bits have zero points");
  // The last entry that a zero point selects is code - zero + 16, so more than 16 would read before the table.
  args.zeros = Tensor(weight.zeros, "zeros").is(DType::kUInt8).has_shape(shape).is_contiguous().as<uint8_t>();
}

// Fills in all arguments except the output.
GroupedLinearArgs linear_args(nb::handle x_object, nb::handle sums, const Weight& weight, nb::handle bias_object,
                              int64_t num_columns, bool gated) {
  const Tensor x(x_object, "x");
  x.is_floating().has_shape({-1, -1}).has_rows();
  GroupedLinearArgs args = {};
  args.dtype = x.dtype();
  args.x = x.data();
  args.x_stride = x.row_stride();
  args.num_rows = x.size(0);
  args.num_columns = num_columns;
  args.depth = x.size(1);
  args.gated = gated;
  set_weight(args, weight);
  if (args.mins != nullptr) {
    const Tensor x_sums(sums, "x_sums");
    args.x_sums =
        x_sums.is(DType::kFloat32).has_shape({args.num_rows, args.num_groups()}).is_contiguous().as<float>();
  }
  if (!bias_object.is_none()) {
    const Tensor bias(bias_object, "bias");
    bias.is_floating().has_shape({gated ? 2 * num_columns : num_columns}).is_contiguous();
    args.bias = bias.data();
    args.bias_dtype = bias.dtype();
  }
  return args;
}

void linear_grouped(nb::handle x, nb::handle x_sums, nb::handle panels, nb::handle scales, nb::handle mins,
                    nb::handle zeros, nb::handle table, int64_t group_size, nb::handle bias, nb::handle out_object,
                    const std::optional<std::string>& gate) {
  const Tensor out(out_object, "out");
  out.is_floating().has_shape({-1, -1}).has_rows();
  GroupedLinearArgs args = linear_args(x, x_sums, {panels, scales, mins, zeros, table, group_size}, bias, out.size(1),
                                       gate.has_value());
  out.has_shape({args.num_rows, -1});
  args.out_dtype = out.dtype();
  args.out = out.data();
  args.out_stride = out.row_stride();
  if (gate) args.activation = activation_named(*gate);
  perform([args] { kernels().linear_grouped(args); });
}

void linear_grouped_best(nb::handle x, nb::handle x_sums, nb::handle panels, nb::handle scales, nb::handle mins,
                         nb::handle zeros, nb::handle table, int64_t group_size, nb::handle bias, int64_t num_columns,
                         nb::handle allowed, nb::handle best_object) {
  GroupedLinearArgs args =
      linear_args(x, x_sums, {panels, scales, mins, zeros, table, group_size}, bias, num_columns, false);
  const Tensor best(best_object, "best");
  const int64_t num_panels = ceil_div(num_columns, kPanelColumns);
  best.is(DType::kFloat32).has_shape({args.num_rows, 2, num_panels}).is_contiguous();
  args.out_dtype = DType::kFloat32;
  args.out = best.data();
  args.out_stride = 2 * num_panels;
  args.best = true;
  args.allowed = allowed_columns(allowed, best);
  perform([args] { kernels().linear_grouped(args); });
}

void sum_groups(nb::handle x_object, int64_t group_size, nb::handle sums_object) {
  const Tensor x(x_object, "x"), sums(sums_object, "sums");
  x.is_floating().has_shape({-1, -1}).has_rows();
  if (group_size < 1) raise_value_error("a group has at least one column");
  sums.is(DType::kFloat32).has_shape({x.size(0), ceil_div(x.size(1), group_size)}).is_contiguous();
  const SumGroupsArgs args = {x.dtype(), x.data(),  x.row_stride(), sums.as<float>(),
                              x.size(0), x.size(1), group_size};
  perform([args] { kernels().sum_groups(args); });
}

void gather_columns_of(nb::handle x_object, nb::handle order_object, nb::handle out_object) {
  const Tensor x(x_object, "x"), order(order_object, "order"), out(out_object, "out");
  x.is_floating().has_shape({-1, -1}).has_rows();
  order.is(DType::kInt32).has_shape({-1}).is_contiguous();
  out.same_dtype(x).has_shape({x.size(0), order.size(0)}).is_contiguous();
  const GatherColumnsArgs args = {x.data(),
                                  x.row_stride(),
                                  order.as<int32_t>(),
                                  out.data(),
                                  x.size(0),
                                  order.size(0),
                                  static_cast<int64_t>(element_size(x.dtype()))};
  // The order belongs to a weight, so it is the same whenever a recorded step is replayed.
  const auto bounds = std::minmax_element(args.order, args.order + args.num_columns);
  if (args.num_columns > 0 && (*bounds.first < 0 || *bounds.second >= x.size(1))) {
    raise_value_error("order names a column that x does not have");
  }
  perform([args] { gather_columns(args); });
}

}  // namespace

void bind_grouped(nb::module_& m) {
  m.def("pack_codes", &pack_codes_of, "codes"_a, "panels"_a, "first"_a = 0, "half"_a = nb::none());
  m.def("linear_grouped", &linear_grouped, "x"_a, "x_sums"_a.none(), "panels"_a, "scales"_a, "mins"_a.none(),
        "zeros"_a.none(), "table"_a.none(), "group_size"_a, "bias"_a.none(), "out"_a, "gate"_a = nb::none());
  m.def("linear_grouped_best", &linear_grouped_best, "x"_a, "x_sums"_a.none(), "panels"_a, "scales"_a,
        "mins"_a.none(), "zeros"_a.none(), "table"_a.none(), "group_size"_a, "bias"_a.none(), "num_columns"_a,
        "allowed"_a.none(), "best"_a);
  m.def("sum_groups", &sum_groups, "x"_a, "group_size"_a, "sums"_a);
  m.def("gather_columns", &gather_columns_of, "x"_a, "order"_a, "out"_a);
}

}  // namespace shardline
