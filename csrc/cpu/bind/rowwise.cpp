// Python entry points of norms, sums and activations: check the tensors, fill in the arguments, release the GIL.
#include <nanobind/stl/string.h>

#include <string>

#include "bind/bind.h"
#include "bind/tensor.h"
#include "dispatch/kernels.h"
#include "runtime/program.h"

namespace shardline {
namespace {

using namespace nanobind::literals;

// Sets where a norm's rows go: a tensor like x, or a tuple of three, the values, scales and sums of quantized rows.
void set_output(NormArgs& args, const Tensor& x, nb::handle out_object) {
  if (nb::isinstance<nb::tuple>(out_object)) {
    if (nb::len(out_object) != 3) raise_value_error("out must be a tensor, or a tuple of values, scales and sums");
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
    x.has_shape({-1, -1, -1}).has_heads();
  } else {
    x.has_shape({-1, -1}).has_rows();
  }
  x.is_floating();
  NormArgs args = {};
  args.dtype = x.dtype();
  args.x = x.data();
  args.x_stride = x.row_stride();
  args.head_stride = heads ? x.head_stride() : 0;
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

void scale_rows(nb::handle x_object, nb::handle factors_object, nb::handle positions_object, nb::handle out_object) {
  const Tensor x(x_object, "x"), factors(factors_object, "factors"), out(out_object, "out");
  x.is_floating().has_shape({-1, -1}).has_rows();
  out.same_dtype(x).has_shape({x.size(0), x.size(1)}).has_rows();
  factors.is(DType::kFloat32).has_shape({-1}).is_contiguous();
  ScaleRowsArgs args = {x.dtype(), x.data(),   x.row_stride(),   factors.as<float>(), factors.size(0), nullptr,
                        false,     out.data(), out.row_stride(), x.size(0),           x.size(1)};
  if (!positions_object.is_none()) {
    const Tensor positions(positions_object, "positions");
    args.positions_are_int64 = positions.dtype() == DType::kInt64;
    if (!args.positions_are_int64) positions.is(DType::kInt32);
    args.positions = positions.has_shape({x.size(0)}).is_contiguous().data();
  } else if (args.num_factors != 1) {
    factors.has_shape({x.size(0)});
  }
  perform([args] {
    for (int64_t row = 0; args.positions != nullptr && row < args.num_rows; ++row) {
      const int64_t position = args.positions_are_int64 ? static_cast<const int64_t*>(args.positions)[row]
                                                        : static_cast<const int32_t*>(args.positions)[row];
      if (position < 0 || position >= args.num_factors) raise_value_error("a position has no factor");
    }
    kernels().scale_rows(args);
  });
}

void activation(nb::handle x_object, nb::handle out_object, const std::string& name, bool gated) {
  const Tensor x(x_object, "x"), out(out_object, "out");
  x.is_floating().has_shape({-1, -1}).has_rows();
  out.same_dtype(x).has_shape({x.size(0), gated ? x.size(1) / 2 : x.size(1)}).is_contiguous();
  if (gated && x.size(1) % 2 != 0) raise_value_error("gate_up must have an even width");
  const ActivationArgs args = {
      x.dtype(), activation_named(name), x.data(), x.row_stride(), out.data(), x.size(0), out.size(1), gated};
  perform([args] { kernels().activation(args); });
}

void gate_heads(nb::handle x_object, nb::handle gate_object) {
  const Tensor x(x_object, "x"), gate(gate_object, "gate");
  x.is_floating().has_shape({-1, -1, -1}).is_contiguous();
  gate.same_dtype(x).has_shape({x.size(0), x.size(1), x.size(2)}).has_heads();
  const GateHeadsArgs args = {x.dtype(),          x.data(),  gate.data(), gate.row_stride(),
                              gate.head_stride(), x.size(0), x.size(1),   x.size(2)};
  perform([args] { kernels().gate_heads(args); });
}

}  // namespace

Activation activation_named(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "gelu") return Activation::kGelu;
  if (name == "relu") return Activation::kRelu;
  if (name == "relu2") return Activation::kRelu2;
  if (name == "clamped_swish") return Activation::kClampedSwish;
  raise_value_error("unknown activation '" + name + "'; known: silu, gelu_tanh, gelu, relu, relu2");
}

void bind_rowwise(nb::module_& m) {
  m.def("rms_norm", &rms_norm, "x"_a, "weight"_a, "out"_a, "eps"_a, "weight_offset"_a, "residual"_a.none(),
        "summed"_a.none());
  m.def("layer_norm", &layer_norm, "x"_a, "weight"_a, "bias"_a.none(), "out"_a, "eps"_a, "residual"_a.none(),
        "summed"_a.none());
  m.def("add", &add, "x"_a, "y"_a, "out"_a);
  m.def("scale_rows", &scale_rows, "x"_a, "factors"_a, "positions"_a.none(), "out"_a);
  m.def("activation", &activation, "x"_a, "out"_a, "name"_a, "gated"_a);
  m.def("gate_heads", &gate_heads, "x"_a, "gate"_a);
}

}  // namespace shardline
