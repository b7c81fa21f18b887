// Python entry points of the mixture of experts.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bind/bind.h"
#include "bind/tensor.h"
#include "moe/experts.h"
#include "runtime/program.h"

namespace shardline {
namespace {

using namespace nanobind::literals;

void route_experts(nb::handle logits_object, nb::handle bias_object, nb::handle ids_object, nb::handle weights_object,
                   nb::handle shared_scale_object, nb::handle counts_object, bool sigmoid, bool normalized, float scale,
                   int64_t num_experts, int64_t num_groups, int64_t top_groups, bool top2_sum) {
  const Tensor logits(logits_object, "logits"), ids(ids_object, "ids"), weights(weights_object, "weights");
  const bool gated = !shared_scale_object.is_none();
  logits.is(DType::kFloat32).has_shape({-1, num_experts + gated}).has_rows();
  ids.is(DType::kInt32).has_shape({logits.size(0), -1}).is_contiguous();
  weights.is(DType::kFloat32).has_shape({logits.size(0), ids.size(1)}).is_contiguous();
  RouteArgs args = {};
  args.logits = logits.as<float>();
  args.logits_stride = logits.row_stride();
  args.num_tokens = logits.size(0);
  args.num_experts = num_experts;
  args.experts_per_token = ids.size(1);
  args.num_groups = num_groups;
  args.top_groups = top_groups;
  if (num_groups < 1 || top_groups < 1 || top_groups > num_groups || num_experts % num_groups != 0) {
    raise_value_error("groups must have equal sizes, and at least one group must be eligible");
  }
  if (ids.size(1) < 1 || ids.size(1) > num_experts / num_groups * top_groups) {
    raise_value_error("a token must choose at least one expert, and at most those that are eligible");
  }
  args.sigmoid = sigmoid;
  args.top2_sum = top2_sum;
  args.normalized = normalized;
  args.scale = scale;
  args.ids = ids.as<int32_t>();
  args.weights = weights.as<float>();
  if (!bias_object.is_none()) {
    const Tensor bias(bias_object, "bias");
    args.bias = bias.is(DType::kFloat32).has_shape({num_experts}).is_contiguous().as<float>();
  }
  if (gated) {
    const Tensor shared_scale(shared_scale_object, "shared_scale");
    args.shared_scale = shared_scale.is(DType::kFloat32).has_shape({logits.size(0)}).is_contiguous().as<float>();
  }
  if (!counts_object.is_none()) {
    const Tensor counts(counts_object, "counts");
    args.counts = counts.is(DType::kInt64).has_shape({num_experts}).is_contiguous().as<int64_t>();
  }
  perform([args] { route(args); });
}

int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// Checks panels of codes and what belongs to them: (scales, mins, zeros, table, group size, order, rounding), or the
// scales of rows in fp8. The order of columns may be None. The rounding of x is None or (fixed scales of the experts,
// bound).
void set_grouped(ExpertStack& stack, const Tensor& panels, nb::handle scales_object, int64_t num_panels,
                 int64_t depth) {
  const bool is_fp8 = !nb::isinstance<nb::tuple>(scales_object);
  const nb::tuple parts = is_fp8 ? nb::make_tuple(scales_object, nb::none(), nb::none(), nb::none(),
                                                  round_up(depth, kOctet), nb::none(), nb::none())
                                 : nb::cast<nb::tuple>(scales_object);
  if (parts.size() != 7) {
    raise_value_error("scales of groups are (scales, mins, zeros, table, group size, order, rounding)");
  }
  stack.kind = WeightKind::kGrouped;
  if (is_fp8) stack.grouped.table = e4m3_table();
  set_grouped_weight(stack.grouped, {panels.size(0), num_panels, depth},
                     {panels, parts[0], parts[1], parts[2], parts[3], nb::cast<int64_t>(parts[4])});
  stack.panel_bytes = round_up(depth, kOctet) / kOctet * octet_bytes(stack.grouped.bits);
  if (!parts[5].is_none()) {
    const Tensor order(parts[5], "order");
    stack.order = order.is(DType::kInt32).has_shape({panels.size(0), depth}).is_contiguous().as<int32_t>();
    const auto bounds = std::minmax_element(stack.order, stack.order + panels.size(0) * depth);
    if (*bounds.first < 0 || *bounds.second >= depth) raise_value_error("order names a column that x does not have");
  }
  if (parts[6].is_none()) return;
  const nb::tuple rounding = nb::cast<nb::tuple>(parts[6]);
  if (rounding.size() != 2 || stack.grouped.mins.data != nullptr || stack.order != nullptr) {
    raise_value_error("a rounding is (fixed scales, bound), and its weights have no mins and no order");
  }
  stack.rounds_x = true;
  stack.input_bound = nb::cast<float>(rounding[1]);
  const Tensor fixed(rounding[0], "fixed scales");
  stack.input_scales = fixed.is(DType::kFloat32).has_shape({panels.size(0)}).is_contiguous().as<float>();
}

// Checks panels that pack_weight, pack_int8, pack_int4 or pack_codes made, with the experts as the first dimension. The
// scales of a rotated weight are a tuple of one.
ExpertStack stack_of(nb::handle panels_object, nb::handle scales_object, DType dtype, int64_t columns, int64_t depth) {
  const Tensor panels(panels_object, "panels");
  const int64_t num_panels = round_up(columns, kPanelColumns) / kPanelColumns;
  ExpertStack stack = {};
  if (depth < 1) raise_value_error("a weight needs at least one input feature");
  if (panels.dtype() == dtype) {
    const int64_t padded_depth = dtype == DType::kBFloat16 ? round_up(depth, 2) : depth;
    panels.has_shape({-1, num_panels, padded_depth, kPanelColumns}).is_contiguous();
    stack.kind = WeightKind::kFloating;
    stack.panel_bytes = padded_depth * kPanelColumns * static_cast<int64_t>(element_size(dtype));
  } else if (panels.rank() == 4 && panels.size(3) != kInt4GroupBytes) {
    set_grouped(stack, panels, scales_object, num_panels, depth);
  } else {
    stack.rotated = nb::isinstance<nb::tuple>(scales_object) && nb::len(scales_object) == 1;
    const Tensor scales(stack.rotated ? nb::object(scales_object[0]) : nb::borrow(scales_object), "scales");
    scales.is(DType::kFloat32).has_shape({panels.size(0), num_panels * kPanelColumns}).is_contiguous();
    stack.scales = scales.as<float>();
    panels.is(DType::kUInt8).is_contiguous();
    if (panels.rank() == 5) {
      panels.has_shape({-1, num_panels, round_up(depth, kQuad) / kQuad, kPanelColumns, kQuad});
      stack.kind = WeightKind::kInt8;
      stack.panel_bytes = round_up(depth, kQuad) * kPanelColumns;
    } else {
      const int64_t groups = round_up(depth, kGroupDepth) / kGroupDepth;
      panels.has_shape({-1, num_panels, groups, kInt4GroupBytes});
      stack.kind = WeightKind::kInt4;
      stack.panel_bytes = groups * kInt4GroupBytes;
    }
  }
  stack.panels = panels.as<char>();
  stack.num_experts = panels.size(0);
  stack.num_panels = num_panels;
  return stack;
}

ExpertRange range_of(const Tensor& ids, int64_t first, int64_t count) {
  ids.is(DType::kInt32).has_shape({-1, -1}).is_contiguous();
  return {ids.as<int32_t>(), ids.size(0), ids.size(1), first, count};
}

void check_rows(int64_t rows, int64_t needed, const char* name) {
  if (rows < needed) {
    raise_value_error(std::string(name) + " has " + std::to_string(rows) + " rows, the routing needs " +
                      std::to_string(needed));
  }
}

// Checks the biases of all experts of a stack, [num_experts, columns], or those of rows, [rows, 1, columns], or
// with factors [rows, 2, columns].
ExpertBias bias_of(nb::handle bias_object, DType dtype, int64_t num_experts, int64_t columns) {
  if (bias_object.is_none()) return {};
  const Tensor bias(bias_object, "bias");
  if (bias.rank() == 3) {
    bias.is(DType::kFloat32).has_shape({-1, -1, columns}).is_contiguous();
    if (bias.size(1) != 1 && bias.size(1) != 2) raise_value_error("rows have a bias, and perhaps a factor");
    return {bias.data(), bias.dtype(), bias.size(1) * columns, bias.size(1) == 2 ? columns : 0, bias.size(0)};
  }
  if (bias.dtype() != dtype) raise_value_error("bias must have the dtype of x");
  return {bias.has_shape({num_experts, columns}).is_contiguous().data(), dtype, 0, 0, 0};
}

// Checks that rows with biases of their own have one each.
void check_bias(const ExpertBias& bias, const SortedSlots& slots) {
  if (bias.row_stride != 0) check_rows(bias.num_rows, slots.num_rows(), "bias");
}

void expert_up(nb::handle x_object, nb::handle ids_object, int64_t first, bool compact, nb::handle panels,
               nb::handle scales, const std::string& activation, bool gated, nb::handle out_object, nb::handle bias) {
  const Tensor x(x_object, "x"), ids(ids_object, "ids"), out(out_object, "out");
  x.is_floating().has_shape({-1, -1}).has_rows();
  out.same_dtype(x).has_shape({-1, -1}).is_contiguous();
  ExpertUpArgs args = {};
  args.dtype = x.dtype();
  args.x = x.data();
  args.x_stride = x.row_stride();
  args.depth = x.size(1);
  args.width = out.size(1);
  args.weight = stack_of(panels, scales, x.dtype(), gated ? 2 * out.size(1) : out.size(1), x.size(1));
  args.bias = bias_of(bias, x.dtype(), args.weight.num_experts, gated ? 2 * out.size(1) : out.size(1));
  args.activation = activation_named(activation);
  args.gated = gated;
  args.out = out.data();
  args.compact = compact;
  args.range = range_of(ids, first, args.weight.num_experts);
  perform([args, x_rows = x.size(0), out_rows = out.size(0)] {
    const SortedSlots& slots = sort_slots(args.range, args.compact);
    check_rows(x_rows, slots.num_tokens, "x");
    check_rows(out_rows, slots.num_rows(), "out");
    check_bias(args.bias, slots);
    expert_up(args, slots);
  });
}

ExpertDownArgs down_args(const Tensor& x, nb::handle panels, nb::handle scales, const Tensor& out, nb::handle bias) {
  x.is_floating().has_shape({-1, -1}).is_contiguous();
  out.is_floating().has_shape({-1, -1}).has_rows();
  ExpertDownArgs args = {};
  args.dtype = x.dtype();
  args.out_dtype = out.dtype();
  args.x = x.data();
  args.depth = x.size(1);
  args.width = out.size(1);
  args.weight = stack_of(panels, scales, x.dtype(), out.size(1), x.size(1));
  args.bias = bias_of(bias, x.dtype(), args.weight.num_experts, out.size(1));
  return args;
}

// Fills in all arguments except rows and places; `out` has a row per token of `weights`.
CombineArgs combine_args(const Tensor& weights, nb::handle shared_object, nb::handle shared_scale_object,
                         const Tensor& out) {
  weights.is(DType::kFloat32).has_shape({-1, -1}).is_contiguous();
  out.is_floating().has_shape({weights.size(0), -1}).has_rows();
  CombineArgs args = {};
  args.rows_dtype = args.shared_dtype = args.out_dtype = out.dtype();
  args.weights = weights.as<float>();
  args.out = out.data();
  args.out_stride = out.row_stride();
  args.num_tokens = weights.size(0);
  args.num_slots = weights.size(1);
  args.width = out.size(1);
  if (shared_object.is_none()) return args;
  const Tensor shared(shared_object, "shared");
  shared.is_floating().has_shape({weights.size(0), out.size(1)}).has_rows();
  args.shared = shared.data();
  args.shared_dtype = shared.dtype();
  args.shared_stride = shared.row_stride();
  if (shared_scale_object.is_none()) return args;
  const Tensor scale(shared_scale_object, "shared_scale");
  args.shared_scale = scale.is(DType::kFloat32).has_shape({weights.size(0)}).is_contiguous().as<float>();
  return args;
}

void expert_down(nb::handle x_object, nb::handle ids_object, nb::handle weights_object, int64_t first,
                 nb::handle panels, nb::handle scales, nb::handle shared, nb::handle shared_scale,
                 nb::handle out_object, nb::handle bias) {
  const Tensor x(x_object, "x"), ids(ids_object, "ids"), weights(weights_object, "weights"), out(out_object, "out");
  const ExpertDownArgs down = down_args(x, panels, scales, out, bias);
  CombineArgs args = combine_args(weights, shared, shared_scale, out);
  ids.has_shape({weights.size(0), weights.size(1)});
  perform([down, args, range = range_of(ids, first, down.weight.num_experts), x_rows = x.size(0)]() mutable {
    const SortedSlots& slots = sort_slots(range, false);
    check_rows(x_rows, slots.num_rows(), "x");
    check_bias(down.bias, slots);
    args.rows = expert_down(down, slots);
    args.places = slots.places.data();
    kernels().combine(args);
  });
}

void expert_slots(nb::handle x_object, nb::handle ids_object, int64_t first, nb::handle panels, nb::handle scales,
                  nb::handle out_object, nb::handle bias) {
  const Tensor x(x_object, "x"), ids(ids_object, "ids"), out(out_object, "out");
  const ExpertDownArgs down = down_args(x, panels, scales, out.is_contiguous(), bias);
  perform([down, range = range_of(ids, first, down.weight.num_experts), to = out.data(), x_rows = x.size(0),
           out_rows = out.size(0)] {
    const SortedSlots& slots = sort_slots(range, false);
    check_rows(x_rows, slots.num_rows(), "x");
    check_rows(out_rows, slots.num_rows(), "out");
    check_bias(down.bias, slots);
    const void* rows = expert_down(down, slots);
    unsort_rows(slots, rows, down.width * static_cast<int64_t>(element_size(down.out_dtype)), to);
  });
}

ExpertRanks ranks_of(const Tensor& expert_bounds) {
  expert_bounds.is(DType::kInt64).has_shape({-1}).is_contiguous();
  if (expert_bounds.size(0) < 2) raise_value_error("expert_bounds needs at least two entries");
  return {nullptr, expert_bounds.as<int64_t>(), expert_bounds.size(0) - 1};
}

void combine_slots(nb::handle rows_object, nb::handle ids_object, nb::handle weights_object,
                   nb::handle expert_bounds_object, nb::handle shared, nb::handle shared_scale, nb::handle out_object) {
  const Tensor rows(rows_object, "rows"), ids(ids_object, "ids"), weights(weights_object, "weights");
  const Tensor expert_bounds(expert_bounds_object, "expert_bounds"), out(out_object, "out");
  CombineArgs args = combine_args(weights, shared, shared_scale, out);
  ids.is(DType::kInt32).has_shape({weights.size(0), weights.size(1)}).is_contiguous();
  rows.same_dtype(out).has_shape({-1, out.size(1)}).is_contiguous();
  const int64_t num_slots = ids.size(0) * ids.size(1);
  check_rows(rows.size(0), num_slots, "rows");
  const ExpertRanks ranks = ranks_of(expert_bounds);
  args.rows = rows.data();
  perform([args, ranks, num_slots, chosen = ids.as<int32_t>()]() mutable {
    args.places = received_places(ranks, chosen, num_slots).data();
    kernels().combine(args);
  });
}

void bind_count_exchanged(nb::handle ids_object, const std::vector<int64_t>& token_bounds,
                          nb::handle expert_bounds_object, nb::handle row_counts_object,
                          nb::handle slot_counts_object) {
  const Tensor ids(ids_object, "ids");
  const Tensor expert_bounds(expert_bounds_object, "expert_bounds");
  const Tensor row_counts(row_counts_object, "row_counts"), slot_counts(slot_counts_object, "slot_counts");
  ExpertRanks ranks = ranks_of(expert_bounds);
  ids.is(DType::kInt32).has_shape({-1, -1}).is_contiguous();
  row_counts.is(DType::kInt64).has_shape({ranks.num_ranks, ranks.num_ranks}).is_contiguous();
  slot_counts.is(DType::kInt64).has_shape({ranks.num_ranks, ranks.num_ranks}).is_contiguous();
  const bool fits = token_bounds.size() == static_cast<size_t>(ranks.num_ranks) + 1 && token_bounds.front() == 0 &&
                    token_bounds.back() == ids.size(0) && std::is_sorted(token_bounds.begin(), token_bounds.end());
  if (!fits) raise_value_error("token_bounds must rise from 0 to the number of tokens, one more than there are ranks");
  perform([ranks, token_bounds, chosen = ids.as<int32_t>(), per_token = ids.size(1), rows = row_counts.as<int64_t>(),
           slots = slot_counts.as<int64_t>()]() mutable {
    ranks.token_bounds = token_bounds.data();
    count_exchanged(ranks, chosen, per_token, rows, slots);
  });
}

void bind_place_slots(nb::handle ids_object, nb::handle places_object, nb::handle copies_object, int64_t first_token,
                      nb::handle out_object) {
  const Tensor ids(ids_object, "ids"), places(places_object, "places"), copies(copies_object, "copies");
  const Tensor out(out_object, "out");
  ids.is(DType::kInt32).has_shape({-1, -1}).is_contiguous();
  places.is(DType::kInt32).has_shape({-1, -1}).is_contiguous();
  copies.is(DType::kInt32).has_shape({places.size(0)}).is_contiguous();
  out.is(DType::kInt32).has_shape({ids.size(0), ids.size(1)}).is_contiguous();
  if (first_token < 0) raise_value_error("first_token must be at least 0");
  perform([from = ids.as<int32_t>(), num_tokens = ids.size(0), per_token = ids.size(1), table = places.as<int32_t>(),
           width = places.size(1), counts = copies.as<int32_t>(), first_token, to = out.as<int32_t>()] {
    place_slots(from, num_tokens, per_token, table, width, counts, first_token, to);
  });
}

void bind_pack_dispatch(nb::handle x_object, nb::handle ids_object, nb::handle expert_bounds_object,
                        nb::handle out_object) {
  const Tensor x(x_object, "x"), ids(ids_object, "ids"), expert_bounds(expert_bounds_object, "expert_bounds");
  const Tensor out(out_object, "out");
  const ExpertRanks ranks = ranks_of(expert_bounds);
  x.is_floating().has_shape({-1, -1}).has_rows();
  ids.is(DType::kInt32).has_shape({x.size(0), -1}).is_contiguous();
  out.same_dtype(x).has_shape({-1, x.size(1)}).is_contiguous();
  check_rows(out.size(0), x.size(0) * std::min(ids.size(1), ranks.num_ranks), "out");
  const int64_t item = static_cast<int64_t>(element_size(x.dtype()));
  perform([ranks, chosen = ids.as<int32_t>(), num_tokens = ids.size(0), per_token = ids.size(1), from = x.as<char>(),
           stride = x.row_stride() * item, row_bytes = x.size(1) * item,
           to = out.as<char>()] { pack_dispatch(ranks, chosen, num_tokens, per_token, from, stride, row_bytes, to); });
}

}  // namespace

void bind_experts(nb::module_& m) {
  m.def("route_experts", &route_experts, "logits"_a, "bias"_a.none(), "ids"_a, "weights"_a, "shared_scale"_a.none(),
        "counts"_a.none(), "sigmoid"_a, "normalized"_a, "scale"_a, "num_experts"_a, "num_groups"_a, "top_groups"_a,
        "top2_sum"_a);
  m.def("expert_up",
        static_cast<void (*)(nb::handle, nb::handle, int64_t, bool, nb::handle, nb::handle, const std::string&, bool,
                             nb::handle, nb::handle)>(&expert_up),
        "x"_a, "ids"_a, "first_expert"_a, "compact"_a, "panels"_a, "scales"_a.none(), "activation"_a, "gated"_a,
        "out"_a, "bias"_a.none());
  m.def("expert_down",
        static_cast<void (*)(nb::handle, nb::handle, nb::handle, int64_t, nb::handle, nb::handle, nb::handle,
                             nb::handle, nb::handle, nb::handle)>(&expert_down),
        "x"_a, "ids"_a, "weights"_a, "first_expert"_a, "panels"_a, "scales"_a.none(), "shared"_a.none(),
        "shared_scale"_a.none(), "out"_a, "bias"_a.none());
  m.def("expert_slots", &expert_slots, "x"_a, "ids"_a, "first_expert"_a, "panels"_a, "scales"_a.none(), "out"_a,
        "bias"_a.none());
  m.def("combine_slots", &combine_slots, "rows"_a, "ids"_a, "weights"_a, "expert_bounds"_a, "shared"_a.none(),
        "shared_scale"_a.none(), "out"_a);
  m.def("count_exchanged", &bind_count_exchanged, "ids"_a, "token_bounds"_a, "expert_bounds"_a, "row_counts"_a,
        "slot_counts"_a);
  m.def("place_slots", &bind_place_slots, "ids"_a, "places"_a, "copies"_a, "first_token"_a, "out"_a);
  m.def("pack_dispatch", &bind_pack_dispatch, "x"_a, "ids"_a, "expert_bounds"_a, "out"_a);
}

}  // namespace shardline
