// Python entry point of the products with adapters: checks the tensors, fills in the arguments, releases the GIL.
#include <vector>

#include "bind/bind.h"
#include "bind/tensor.h"
#include "dispatch/kernels.h"
#include "moe/experts.h"
#include "runtime/program.h"

namespace shardline {
namespace {

using namespace nanobind::literals;

// The weights of adapters, see low_rank_args.h.
struct Weights {
  nb::handle down, up, ranks, scales, factors, scaled, bounds;
};

// Fills in all arguments except x, the rows of each row, and the bias, for `num_rows` rows at most.
LowRankArgs args_of(const Tensor& x, int64_t num_rows, const Weights& weights, nb::handle hidden_object,
                    nb::handle order_object, nb::handle out_object) {
  const Tensor down(weights.down, "down"), up(weights.up, "up"), ranks(weights.ranks, "ranks");
  const Tensor scales(weights.scales, "scales"), bounds(weights.bounds, "bounds");
  const Tensor hidden(hidden_object, "hidden"), order(order_object, "order"), out(out_object, "out");
  LowRankArgs args = {};
  args.dtype = x.is_floating().has_shape({-1, -1}).has_rows().dtype();
  args.x = x.data();
  args.x_stride = x.row_stride();
  args.num_rows = num_rows;
  args.depth = x.size(1);
  args.up = up.same_dtype(x).has_shape({-1, -1, -1}).is_contiguous().data();
  args.num_slots = up.size(0);
  args.max_rank = up.size(1);
  args.num_columns = up.size(2);
  args.num_parts = ranks.is(DType::kInt32).has_shape({args.num_slots, -1}).is_contiguous().size(1);
  args.ranks = ranks.as<int32_t>();
  args.scales = scales.is(DType::kFloat32).has_shape({args.num_slots, args.num_parts}).is_contiguous().as<float>();
  args.bounds = bounds.is(DType::kInt64).has_shape({args.num_parts + 1}).is_contiguous().as<int64_t>();
  const int64_t step = args.dtype == DType::kBFloat16 ? 2 : 1, steps = (args.depth + step - 1) / step;
  down.same_dtype(x).is_contiguous();
  args.down = down.has_shape({args.num_slots, args.num_parts * args.rank_blocks(), steps, kRankBlock * step}).data();
  args.hidden = hidden.is(DType::kFloat32)
                    .has_shape({num_rows, args.num_parts * args.rank_blocks() * kRankBlock})
                    .is_contiguous()
                    .as<float>();
  args.order =
      order.is(DType::kInt32).has_shape({args.num_slots + num_rows * (kAdapterRows + 3)}).is_contiguous().as<int32_t>();
  const Tensor factors(weights.factors, "factors"), scaled(weights.scaled, "scaled");
  factors.is(DType::kFloat32).has_shape({args.num_slots, args.num_columns}).is_contiguous();
  args.scaled = scaled.is(DType::kInt32).has_shape({args.num_slots, args.num_parts}).is_contiguous().as<int32_t>();
  if (out.rank() == 3 && out.size(1) == 2) {
    out.has_shape({num_rows, 2, args.num_columns});
    args.factors = factors.as<float>();
  } else if (out.rank() == 3) {
    out.has_shape({num_rows, 1, args.num_columns});
  } else {
    out.has_shape({num_rows, args.num_columns});
  }
  args.out = out.is(DType::kFloat32).is_contiguous().as<float>();
  if (args.bounds[0] != 0 || args.bounds[args.num_parts] != args.num_columns) raise_value_error("bounds are wrong");
  return args;
}

void check_slots(const LowRankArgs& args) {
  for (int64_t row = 0; row < args.num_rows; ++row) {
    if (args.slots[row] >= args.num_slots) raise_value_error("a row has an adapter that does not exist");
  }
}

void low_rank(nb::handle x_object, nb::handle slots_object, nb::handle down, nb::handle up, nb::handle ranks,
              nb::handle scales, nb::handle factors, nb::handle scaled, nb::handle bounds, nb::handle bias_object,
              nb::handle hidden, nb::handle order, nb::handle out) {
  const Tensor x(x_object, "x"), slots(slots_object, "slots");
  LowRankArgs args = args_of(x, x.size(0), {down, up, ranks, scales, factors, scaled, bounds}, hidden, order, out);
  args.slots = slots.is(DType::kInt32).has_shape({args.num_rows}).is_contiguous().as<int32_t>();
  if (!bias_object.is_none()) {
    const Tensor bias(bias_object, "bias");
    args.bias = bias.is_floating().has_shape({args.num_columns}).is_contiguous().data();
    args.bias_dtype = bias.dtype();
  }
  perform([args] {
    check_slots(args);
    kernels().low_rank(args);
  });
}

void expert_low_rank(nb::handle x_object, nb::handle ids_object, int64_t first, int64_t num_experts, bool compact,
                     bool sorted, nb::handle adapters_object, nb::handle down, nb::handle up, nb::handle ranks,
                     nb::handle scales, nb::handle factors, nb::handle scaled, nb::handle bounds,
                     nb::handle bias_object, nb::handle hidden, nb::handle order, nb::handle out) {
  const Tensor x(x_object, "x"), ids(ids_object, "ids"), adapters(adapters_object, "adapters");
  ids.is(DType::kInt32).has_shape({-1, -1}).is_contiguous();
  const int64_t most_rows = ids.size(0) * ids.size(1);
  LowRankArgs args = args_of(x, most_rows, {down, up, ranks, scales, factors, scaled, bounds}, hidden, order, out);
  adapters.is(DType::kInt32).has_shape({ids.size(0)}).is_contiguous();
  if (num_experts < 1 || args.num_slots % num_experts != 0) raise_value_error("adapters have a slot for each expert");
  if (!bias_object.is_none()) {
    const Tensor bias(bias_object, "bias");
    args.bias = bias.is_floating().has_shape({num_experts, args.num_columns}).is_contiguous().data();
    args.bias_dtype = bias.dtype();
  }
  perform([args, range = ExpertRange{ids.as<int32_t>(), ids.size(0), ids.size(1), first, num_experts}, compact, sorted,
           adapter = adapters.as<int32_t>(), x_rows = x.size(0)]() mutable {
    const SortedSlots& slots = sort_slots(range, compact);
    if (x_rows < (sorted ? slots.num_rows() : slots.num_tokens)) raise_value_error("x has too few rows");
    thread_local std::vector<int32_t> row_slots, experts;
    row_slots.resize(static_cast<size_t>(slots.num_rows()));
    experts.resize(row_slots.size());
    for (size_t slot = 0; slot < slots.places.size(); ++slot) {
      const int32_t row = slots.places[slot];
      if (row < 0) continue;
      const int32_t own = adapter[static_cast<int64_t>(slot) / range.experts_per_token];
      const int32_t expert = range.ids[slot] - static_cast<int32_t>(range.first);
      experts[static_cast<size_t>(row)] = expert;
      row_slots[static_cast<size_t>(row)] = own < 0 ? -1 : own * static_cast<int32_t>(range.count) + expert;
    }
    args.num_rows = slots.num_rows();
    args.slots = row_slots.data();
    args.biases = experts.data();
    args.x_rows = sorted ? nullptr : slots.tokens.data();
    check_slots(args);
    kernels().low_rank(args);
  });
}

}  // namespace

void bind_low_rank(nb::module_& m) {
  m.def("low_rank", &low_rank, "x"_a, "slots"_a, "down"_a, "up"_a, "ranks"_a, "scales"_a, "factors"_a, "scaled"_a,
        "bounds"_a, "bias"_a.none(), "hidden"_a, "order"_a, "out"_a);
  m.def("expert_low_rank", &expert_low_rank, "x"_a, "ids"_a, "first_expert"_a, "num_experts"_a, "compact"_a, "sorted"_a,
        "adapters"_a, "down"_a, "up"_a, "ranks"_a, "scales"_a, "factors"_a, "scaled"_a, "bounds"_a, "bias"_a.none(),
        "hidden"_a, "order"_a, "out"_a);
}

}  // namespace shardline
