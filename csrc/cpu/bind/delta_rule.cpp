// Python entry point of the gated delta rule: checks the tensors, fills in the arguments, releases the GIL.
#include "bind/bind.h"
#include "bind/tensor.h"
#include "dispatch/kernels.h"
#include "runtime/program.h"

namespace shardline {
namespace {

using namespace nanobind::literals;

// The rows of a recorded call have other values when it is replayed.
void check_rows(const DeltaRuleArgs& args, int64_t num_tokens, int64_t num_rows) {
  if (args.query_starts[0] != 0 || args.query_starts[args.num_sequences] != num_tokens) {
    raise_value_error("query_starts must run from 0 to the number of tokens");
  }
  for (int64_t s = 0; s < args.num_sequences; ++s) {
    const int64_t count = args.query_starts[s + 1] - args.query_starts[s];
    if (count < 0 || args.context_lens[s] < count) raise_value_error("a sequence has more new tokens than tokens");
    if (args.rows[s] < 0 || args.rows[s] >= num_rows) raise_value_error("a sequence has no state");
  }
}

void delta_rule(nb::handle qkv_object, nb::handle gate_object, nb::handle beta_object, nb::handle decay_object,
                nb::handle conv_object, nb::handle decay_log_object, nb::handle decay_offset_object,
                nb::handle norm_object, nb::handle state_object, nb::handle recent_object,
                nb::handle query_starts_object, nb::handle context_lens_object, nb::handle rows_object,
                nb::handle out_object, float eps) {
  const Tensor qkv(qkv_object, "qkv"), gate(gate_object, "gate"), beta(beta_object, "beta");
  const Tensor decay(decay_object, "decay"), conv(conv_object, "conv"), norm(norm_object, "norm");
  const Tensor decay_log(decay_log_object, "decay_log"), decay_offset(decay_offset_object, "decay_offset");
  const Tensor state(state_object, "state"), recent(recent_object, "recent"), out(out_object, "out");
  const Tensor starts(query_starts_object, "query_starts"), lens(context_lens_object, "context_lens");
  const Tensor rows(rows_object, "rows");
  state.is(DType::kFloat32).has_shape({-1, -1, -1, -1}).is_contiguous();
  const int64_t heads = state.size(1), key_dim = state.size(2), value_dim = state.size(3);
  qkv.is_floating().has_shape({-1, -1}).has_rows();
  const int64_t num_tokens = qkv.size(0), keys = qkv.size(1) - heads * value_dim;
  if (keys <= 0 || keys % (2 * key_dim) != 0 || heads % (keys / (2 * key_dim)) != 0) {
    raise_value_error("qkv must have a query and a key for each key head, and as many value heads for each of them");
  }
  gate.same_dtype(qkv).has_shape({num_tokens, heads * value_dim}).has_rows();
  beta.same_dtype(qkv).has_shape({num_tokens, heads}).has_rows();
  decay.same_dtype(qkv).has_shape({num_tokens, heads}).has_rows();
  conv.is(DType::kFloat32).has_shape({qkv.size(1), -1}).is_contiguous();
  if (conv.size(1) < 1 || conv.size(1) > kMostTaps) raise_value_error("a convolution sees 1 to 16 tokens");
  decay_log.is(DType::kFloat32).has_shape({heads}).is_contiguous();
  decay_offset.is(DType::kFloat32).has_shape({heads}).is_contiguous();
  norm.same_dtype(qkv).has_shape({value_dim}).is_contiguous();
  recent.same_dtype(qkv).has_shape({state.size(0), conv.size(1) - 1, qkv.size(1)}).is_contiguous();
  starts.is(DType::kInt32).has_shape({-1}).is_contiguous();
  if (starts.size(0) < 1) raise_value_error("query_starts must run from 0 to the number of tokens");
  lens.is(DType::kInt32).has_shape({starts.size(0) - 1}).is_contiguous();
  rows.is(DType::kInt32).has_shape({starts.size(0) - 1}).is_contiguous();
  out.same_dtype(qkv).has_shape({num_tokens, heads * value_dim}).is_contiguous();
  const DeltaRuleArgs args = {qkv.dtype(),
                              qkv.data(),
                              qkv.row_stride(),
                              gate.data(),
                              gate.row_stride(),
                              beta.data(),
                              beta.row_stride(),
                              decay.data(),
                              decay.row_stride(),
                              conv.as<float>(),
                              decay_log.as<float>(),
                              decay_offset.as<float>(),
                              norm.data(),
                              state.as<float>(),
                              recent.data(),
                              starts.as<int32_t>(),
                              lens.as<int32_t>(),
                              rows.as<int32_t>(),
                              out.data(),
                              lens.size(0),
                              keys / (2 * key_dim),
                              heads,
                              key_dim,
                              value_dim,
                              conv.size(1),
                              eps};
  perform([args, num_tokens, num_rows = state.size(0)] {
    check_rows(args, num_tokens, num_rows);
    kernels().delta_rule(args);
  });
}

}  // namespace

void bind_delta_rule(nb::module_& m) {
  m.def("delta_rule", &delta_rule, "qkv"_a, "gate"_a, "beta"_a, "decay"_a, "conv"_a, "decay_log"_a, "decay_offset"_a,
        "norm"_a, "state"_a, "recent"_a, "query_starts"_a, "context_lens"_a, "rows"_a, "out"_a, "eps"_a);
}

}  // namespace shardline
