// Python entry points of the products with codes that share scales in groups.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "bind/bind.h"
#include "bind/tensor.h"
#include "dispatch/kernels.h"
#include "gemm/packed_rows.h"
#include "runtime/program.h"

namespace shardline {
namespace {

using namespace nanobind::literals;

int64_t ceil_div(int64_t count, int64_t unit) { return (count + unit - 1) / unit; }

int64_t bits_of_octet(int64_t bytes, int64_t depth) {
  if (depth < 1) raise_value_error("a weight needs at least one input feature");
  for (const int64_t bits : {4, 6, 8}) {
    if (bytes == octet_bytes(bits)) return bits;
  }
  raise_value_error("an octet of panels has " + std::to_string(octet_bytes(4)) + ", " + std::to_string(octet_bytes(6)) +
                    " or " + std::to_string(octet_bytes(8)) + " bytes, not " + std::to_string(bytes));
}

// Checks panels [num_panels, octets, bytes of an octet] and returns the bits of a code; num_panels -1 stands for any
// number.
int64_t check_code_panels(const Tensor& panels, int64_t num_panels, int64_t depth) {
  panels.is(DType::kUInt8).has_shape({num_panels, ceil_div(depth, kOctet), -1}).is_contiguous();
  return bits_of_octet(panels.size(2), depth);
}

void pack_codes_of(nb::handle codes_object, nb::handle panels_object, int64_t first, std::optional<int64_t> half) {
  const Tensor codes(codes_object, "codes"), panels(panels_object, "panels");
  codes.is(DType::kUInt8).has_shape({-1, -1}).has_rows();
  const int64_t bits = check_code_panels(panels, -1, codes.size(1));
  const PackCodesArgs args = {codes.as<uint8_t>(),
                              codes.row_stride(),
                              panels.as<uint8_t>(),
                              bits,
                              codes.size(0),
                              codes.size(1),
                              panel_columns(panels, codes.size(0), first, half)};
  nb::gil_scoped_release release;
  pack_codes(args);
}

void unpack_words_of(nb::handle words_object, nb::handle codes_object, int64_t bits, const std::vector<int64_t>& order,
                     int64_t offset, bool along_rows, bool transposed) {
  const Tensor words(words_object, "words"), codes(codes_object, "codes");
  const int64_t word_bytes = static_cast<int64_t>(element_size(words.dtype()));
  if (words.dtype() != DType::kInt32) words.is(DType::kUInt8);
  words.has_shape({-1, -1}).has_rows();
  if (bits != 4 && bits != 8) raise_value_error("numbers have 4 or 8 bits");
  const int64_t in_word = word_bytes * 8 / bits;
  // The dim of `words` along which its numbers are neighbours.
  const int dim = along_rows == transposed ? 1 : 0;
  const int64_t strides[] = {words.row_stride() * word_bytes, word_bytes};
  const int64_t unpacked = words.size(dim) * in_word, lines = words.size(1 - dim);
  codes.is(DType::kUInt8).is_contiguous();
  codes.has_shape({along_rows ? unpacked : lines, along_rows ? lines : unpacked});
  UnpackWordsArgs args = {
      words.as<uint8_t>(),          strides[dim], strides[1 - dim],    words.size(dim), lines, word_bytes, bits, {},
      static_cast<uint8_t>(offset), along_rows,   codes.as<uint8_t>(), codes.size(1)};
  std::vector<int64_t> places(static_cast<size_t>(in_word));
  std::iota(places.begin(), places.end(), 0);
  if (!order.empty() && !std::is_permutation(order.begin(), order.end(), places.begin(), places.end())) {
    raise_value_error("order must name each number of a word once");
  }
  std::copy_n(order.empty() ? places.begin() : order.begin(), in_word, args.order);
  nb::gil_scoped_release release;
  unpack_words(args);
}

void unpack_blocks_of(nb::handle blocks_object, int64_t kind, nb::handle codes_object, nb::handle scales_object,
                      nb::handle mins_object) {
  const Tensor blocks(blocks_object, "blocks"), codes(codes_object, "codes");
  blocks.is(DType::kUInt8).has_shape({-1, -1}).has_rows();
  const BlockShape shape = block_shape(static_cast<BlockKind>(kind));
  if (shape.elements == 0) raise_value_error("there is no such type of blocks");
  const int64_t num_rows = blocks.size(0), row_blocks = blocks.size(1) / shape.bytes;
  if (blocks.size(1) % shape.bytes != 0) raise_value_error("rows must be whole blocks");
  codes.is(DType::kUInt8).has_shape({num_rows, row_blocks * shape.elements}).is_contiguous();
  const auto numbers = [&](nb::handle object, const char* name, bool needed) -> uint8_t* {
    if (!needed) return nullptr;
    const Tensor numbers(object, name);
    numbers.is(DType::kInt8).has_shape({num_rows, row_blocks * shape.num_scales}).is_contiguous();
    return reinterpret_cast<uint8_t*>(numbers.as<int8_t>());
  };
  const UnpackBlocksArgs args = {static_cast<BlockKind>(kind),
                                 blocks.as<uint8_t>(),
                                 blocks.row_stride(),
                                 num_rows,
                                 row_blocks,
                                 codes.as<uint8_t>(),
                                 codes.row_stride(),
                                 numbers(scales_object, "scales", shape.num_scales != 0),
                                 numbers(mins_object, "mins", shape.num_scales == 8)};
  nb::gil_scoped_release release;
  kernels().unpack_blocks(args);
}

bool pack_blocks_of(nb::handle blocks_object, int64_t kind, nb::handle panels_object, nb::handle scales_object,
                    nb::handle mins_object, int64_t first, std::optional<int64_t> half) {
  const Tensor blocks(blocks_object, "blocks"), panels(panels_object, "panels");
  blocks.is(DType::kUInt8).has_shape({-1, -1}).has_rows();
  const BlockShape shape = block_shape(static_cast<BlockKind>(kind));
  if (shape.elements == 0) raise_value_error("there is no such type of blocks");
  const int64_t row_blocks = blocks.size(1) / shape.bytes, depth = row_blocks * shape.elements;
  if (blocks.size(1) % shape.bytes != 0) raise_value_error("rows must be whole blocks");
  if (check_code_panels(panels, -1, depth) != shape.bits) raise_value_error("panels have codes of another size");
  const auto numbers = [&](nb::handle object, const char* name, DType plain) -> uint8_t* {
    const Tensor numbers(object, name);
    const bool levels = shape.num_scales != 0;
    numbers.is(levels ? DType::kInt8 : plain).is_contiguous();
    numbers.has_shape({panels.size(0), row_blocks, levels ? (2 + shape.num_scales) * kPanelColumns : kPanelColumns});
    return numbers.as<uint8_t>();
  };
  const PackBlocksArgs args = {static_cast<BlockKind>(kind),
                               blocks.as<uint8_t>(),
                               blocks.row_stride(),
                               blocks.size(0),
                               row_blocks,
                               panels.as<uint8_t>(),
                               numbers(scales_object, "scales", shape.scale_at < 0 ? DType::kFloat32 : DType::kFloat16),
                               shape.min_at < 0 ? nullptr : numbers(mins_object, "mins", DType::kFloat32),
                               panel_columns(panels, blocks.size(0), first, half)};
  nb::gil_scoped_release release;
  return pack_blocks(args);
}

void packed_codes_of(nb::handle panels_object, nb::handle indices_object, nb::handle codes_object) {
  const Tensor panels(panels_object, "panels"), indices(indices_object, "indices"), codes(codes_object, "codes");
  indices.is(DType::kInt64).has_shape({-1}).is_contiguous();
  codes.is(DType::kUInt8).has_shape({indices.size(0), -1}).is_contiguous();
  const int64_t bits = check_code_panels(panels, -1, codes.size(1));
  const int64_t* rows = indices.as<int64_t>();
  if (std::any_of(rows, rows + indices.size(0),
                  [&](int64_t row) { return row < 0 || row >= panels.size(0) * kPanelColumns; })) {
    raise_value_error("an index is outside the weight");
  }
  const PackedCodesArgs args = {panels.as<uint8_t>(), rows, codes.as<uint8_t>(), indices.size(0), codes.size(1), bits};
  nb::gil_scoped_release release;
  packed_codes(args);
}

// Fills in all arguments except the output.
GroupedLinearArgs linear_args(nb::handle x_object, nb::handle x_groups_object, const GroupedTensors& weight,
                              nb::handle bias_object, int64_t num_columns, bool gated) {
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
  const int64_t weight_columns = gated ? gated_weight_columns(num_columns) : num_columns;
  set_grouped_weight(args, {-1, ceil_div(weight_columns, kPanelColumns), args.depth}, weight);
  args.panels = weight.panels.as<uint8_t>();
  if (args.mins.data != nullptr || !x_groups_object.is_none()) {
    const Tensor x_groups(x_groups_object, "x_groups");
    x_groups.is(DType::kFloat32).has_shape({args.num_rows, args.num_groups}).is_contiguous();
    (args.mins.data != nullptr ? args.x_sums : args.x_scales) = x_groups.as<float>();
  }
  set_bias(args, bias_object, args.num_rows, gated ? 2 * num_columns : num_columns);
  return args;
}

void linear_grouped(nb::handle x, nb::handle x_groups, nb::handle panels, nb::handle scales, nb::handle mins,
                    nb::handle zeros, nb::handle table, int64_t group_size, nb::handle bias, nb::handle out_object,
                    const std::optional<std::string>& gate) {
  const Tensor out(out_object, "out");
  out.is_floating().has_shape({-1, -1}).has_rows();
  GroupedLinearArgs args = linear_args(x, x_groups, {Tensor(panels, "panels"), scales, mins, zeros, table, group_size},
                                       bias, out.size(1), gate.has_value());
  out.has_shape({args.num_rows, -1});
  args.out_dtype = out.dtype();
  args.out = out.data();
  args.out_stride = out.row_stride();
  if (gate) args.activation = activation_named(*gate);
  perform([args] { kernels().linear_grouped(args); });
}

void linear_grouped_best(nb::handle x, nb::handle x_groups, nb::handle panels, nb::handle scales, nb::handle mins,
                         nb::handle zeros, nb::handle table, int64_t group_size, nb::handle bias, int64_t num_columns,
                         nb::handle allowed, nb::handle best_object) {
  GroupedLinearArgs args = linear_args(x, x_groups, {Tensor(panels, "panels"), scales, mins, zeros, table, group_size},
                                       bias, num_columns, false);
  const Tensor best(best_object, "best");
  const int64_t num_panels = ceil_div(num_columns, kPanelColumns);
  best.is(DType::kFloat32).has_shape({args.num_rows, 2, num_panels}).is_contiguous();
  args.out_dtype = DType::kFloat32;
  args.out = best.data();
  args.out_stride = 2 * num_panels;
  check_shared_bias(args);
  args.best = true;
  args.allowed = allowed_columns(allowed, best);
  perform([args] { kernels().linear_grouped(args); });
}

void sum_groups(nb::handle x_object, int64_t group_size, nb::handle sums_object) {
  const Tensor x(x_object, "x"), sums(sums_object, "sums");
  x.is_floating().has_shape({-1, -1}).has_rows();
  if (group_size < 1) raise_value_error("a group has at least one column");
  sums.is(DType::kFloat32).has_shape({x.size(0), ceil_div(x.size(1), group_size)}).is_contiguous();
  const SumGroupsArgs args = {x.dtype(), x.data(), x.row_stride(), sums.as<float>(), x.size(0), x.size(1), group_size};
  perform([args] { kernels().sum_groups(args); });
}

void round_rows_e4m3(nb::handle x_object, int64_t group_size, float fixed_scale, float bound, nb::handle out_object,
                     nb::handle scales_object) {
  const Tensor x(x_object, "x"), out(out_object, "out"), scales(scales_object, "scales");
  x.is_floating().has_shape({-1, -1}).has_rows();
  out.same_dtype(x).has_shape({x.size(0), x.size(1)}).is_contiguous();
  if (group_size < 1) raise_value_error("a group has at least one column");
  scales.is(DType::kFloat32).has_shape({x.size(0), ceil_div(x.size(1), group_size)}).is_contiguous();
  const RoundRowsArgs args = {x.dtype(), x.data(),  x.row_stride(), out.data(),  scales.as<float>(),
                              x.size(0), x.size(1), group_size,     fixed_scale, bound};
  perform([args] { kernels().round_rows_e4m3(args); });
}

void gather_columns_of(nb::handle x_object, nb::handle order_object, nb::handle out_object) {
  const Tensor x(x_object, "x"), order(order_object, "order"), out(out_object, "out");
  if (x.dtype() != DType::kUInt8) x.is_floating();
  x.has_shape({-1, -1}).has_rows();
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

void set_grouped_weight(GroupedLinearArgs& args, const GroupedShape& shape, const GroupedTensors& weight) {
  if (weight.group_size < 1 || weight.group_size % kOctet != 0) {
    raise_value_error("a group has a multiple of 8 columns, not " + std::to_string(weight.group_size));
  }
  const int64_t octets = ceil_div(shape.depth, kOctet);
  args.group_size = weight.group_size;
  args.num_groups = ceil_div(shape.depth, args.group_size);
  // A part of the weight: [num_panels, ...], or with experts [num_experts, num_panels, ...].
  const auto check = [&](const Tensor& part, int64_t middle, int64_t last) -> const Tensor& {
    if (shape.num_experts < 0) return part.has_shape({shape.num_panels, middle, last}).is_contiguous();
    return part.has_shape({shape.num_experts, shape.num_panels, middle, last}).is_contiguous();
  };
  const auto check_groups = [&](const Tensor& part) -> const Tensor& {
    return check(part, args.num_groups, kPanelColumns);
  };
  check(weight.panels.is(DType::kUInt8), octets, -1);
  args.bits = bits_of_octet(weight.panels.size(weight.panels.rank() - 1), shape.depth);
  const auto numbers = [&](const Tensor& part) -> GroupNumbers {
    if (part.dtype() != DType::kInt8) {
      if (part.dtype() != DType::kFloat16) part.is_floating();
      return {check_groups(part).data(), part.dtype(), 0};
    }
    const int64_t inner = part.size(part.rank() - 1) / kPanelColumns - 2;
    if (inner < 1 || (inner & (inner - 1)) != 0 || args.num_groups % inner != 0) {
      raise_value_error("scales of two levels have 1, 2, 4, ... groups in an outer group, and whole outer groups");
    }
    check(part, args.num_groups / inner, (2 + inner) * kPanelColumns);
    return {part.data(), DType::kInt8, __builtin_ctzll(static_cast<uint64_t>(inner))};
  };
  args.scales = numbers(Tensor(weight.scales, "scales"));
  if (!weight.mins.is_none()) args.mins = numbers(Tensor(weight.mins, "mins"));
  if (!weight.zeros.is_none()) {
    args.zeros = check_groups(Tensor(weight.zeros, "zeros").is(DType::kUInt8)).as<uint8_t>();
  } else if (args.table == nullptr) {
    const Tensor table(weight.table, "table");
    args.table = table.is(DType::kFloat32).has_shape({int64_t{1} << args.bits}).is_contiguous().as<float>();
  }
}

void bind_grouped(nb::module_& m) {
  m.def("pack_codes", &pack_codes_of, "codes"_a, "panels"_a, "first"_a = 0, "half"_a = nb::none());
  m.def("pack_blocks", &pack_blocks_of, "blocks"_a, "kind"_a, "panels"_a, "scales"_a, "mins"_a.none(), "first"_a = 0,
        "half"_a = nb::none());
  m.def("unpack_blocks", &unpack_blocks_of, "blocks"_a, "kind"_a, "codes"_a, "scales"_a.none(), "mins"_a.none());
  m.def("unpack_words", &unpack_words_of, "words"_a, "codes"_a, "bits"_a, "order"_a, "offset"_a, "along_rows"_a,
        "transposed"_a);
  m.def("packed_codes", &packed_codes_of, "panels"_a, "indices"_a, "codes"_a);
  m.def("linear_grouped", &linear_grouped, "x"_a, "x_groups"_a.none(), "panels"_a, "scales"_a, "mins"_a.none(),
        "zeros"_a.none(), "table"_a.none(), "group_size"_a, "bias"_a.none(), "out"_a, "gate"_a = nb::none());
  m.def("linear_grouped_best", &linear_grouped_best, "x"_a, "x_groups"_a.none(), "panels"_a, "scales"_a,
        "mins"_a.none(), "zeros"_a.none(), "table"_a.none(), "group_size"_a, "bias"_a.none(), "num_columns"_a,
        "allowed"_a.none(), "best"_a);
  m.def("sum_groups", &sum_groups, "x"_a, "group_size"_a, "sums"_a);
  m.def("round_rows_e4m3", &round_rows_e4m3, "x"_a, "group_size"_a, "fixed_scale"_a, "bound"_a, "out"_a, "scales"_a);
  m.def("gather_columns", &gather_columns_of, "x"_a, "order"_a, "out"_a);
}

}  // namespace shardline
