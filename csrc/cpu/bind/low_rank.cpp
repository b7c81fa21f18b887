// Python entry point of the products with adapters: checks the tensors, fills in the arguments, releases the GIL.
#include "bind/bind.h"
#include "bind/tensor.h"
#include "dispatch/kernels.h"
#include "runtime/program.h"

namespace shardline {
namespace {

using namespace nanobind::literals;

void low_rank(nb::handle x_object, nb::handle slots_object, nb::handle down_object, nb::handle up_object,
              nb::handle ranks_object, nb::handle scales_object, nb::handle factors_object, nb::handle scaled_object,
              nb::handle bounds_object, nb::handle bias_object, nb::handle hidden_object, nb::handle order_object,
              nb::handle out_object) {
  const Tensor x(x_object, "x"), slots(slots_object, "slots"), down(down_object, "down"), up(up_object, "up");
  const Tensor ranks(ranks_object, "ranks"), scales(scales_object, "scales"), bounds(bounds_object, "bounds");
  const Tensor hidden(hidden_object, "hidden"), order(order_object, "order"), out(out_object, "out");
  LowRankArgs args = {};
  args.dtype = x.is_floating().has_shape({-1, -1}).has_rows().dtype();
  args.x = x.data();
  args.x_stride = x.row_stride();
  args.num_rows = x.size(0);
  args.depth = x.size(1);
  args.slots = slots.is(DType::kInt32).has_shape({args.num_rows}).is_contiguous().as<int32_t>();
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
                    .has_shape({args.num_rows, args.num_parts * args.rank_blocks() * kRankBlock})
                    .is_contiguous()
                    .as<float>();
  args.order = order.is(DType::kInt32)
                   .has_shape({args.num_slots + args.num_rows * (kAdapterRows + 3)})
                   .is_contiguous()
                   .as<int32_t>();
  const Tensor factors(factors_object, "factors"), scaled(scaled_object, "scaled");
  factors.is(DType::kFloat32).has_shape({args.num_slots, args.num_columns}).is_contiguous();
  args.scaled = scaled.is(DType::kInt32).has_shape({args.num_slots, args.num_parts}).is_contiguous().as<int32_t>();
  if (out.rank() == 3) {
    out.has_shape({args.num_rows, 2, args.num_columns});
    args.factors = factors.as<float>();
  } else {
    out.has_shape({args.num_rows, args.num_columns});
  }
  args.out = out.is(DType::kFloat32).is_contiguous().as<float>();
  if (!bias_object.is_none()) {
    const Tensor bias(bias_object, "bias");
    args.bias = bias.is_floating().has_shape({args.num_columns}).is_contiguous().data();
    args.bias_dtype = bias.dtype();
  }
  if (args.bounds[0] != 0 || args.bounds[args.num_parts] != args.num_columns) raise_value_error("bounds are wrong");
  perform([args] {
    for (int64_t row = 0; row < args.num_rows; ++row) {
      if (args.slots[row] >= args.num_slots) raise_value_error("a row has an adapter that does not exist");
    }
    kernels().low_rank(args);
  });
}

}  // namespace

void bind_low_rank(nb::module_& m) {
  m.def("low_rank", &low_rank, "x"_a, "slots"_a, "down"_a, "up"_a, "ranks"_a, "scales"_a, "factors"_a, "scaled"_a,
        "bounds"_a, "bias"_a.none(), "hidden"_a, "order"_a, "out"_a);
}

}  // namespace shardline
