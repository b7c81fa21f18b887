// Python entry points of linear attention: check the tensors, fill in the arguments, release the GIL.
#include "bind/bind.h"
#include "bind/tensor.h"
#include "dispatch/kernels.h"
#include "runtime/program.h"

namespace shardline {
namespace {

using namespace nanobind::literals;

// The rows of a recorded call have other values when it is replayed.
void check_rows(const LinearAttentionArgs& args, int64_t num_tokens, int64_t num_rows) {
  if (args.query_starts[0] != 0 || args.query_starts[args.num_sequences] != num_tokens) {
    raise_value_error("query_starts must run from 0 to the number of tokens");
  }
  for (int64_t s = 0; s < args.num_sequences; ++s) {
    const int64_t count = args.query_starts[s + 1] - args.query_starts[s];
    if (count < 0 || args.context_lens[s] < count) raise_value_error("a sequence has more new tokens than tokens");
    if (args.rows[s] < 0 || args.rows[s] >= num_rows) raise_value_error("a sequence has no state");
  }
}

// The arguments that both kinds have.
LinearAttentionArgs shared_args(const Tensor& qkv, const Tensor& gate, const Tensor& decay, const Tensor& conv,
                                const Tensor& decay_log, const Tensor& decay_offset, const Tensor& state,
                                const Tensor& recent, nb::handle starts_object, nb::handle lens_object,
                                nb::handle rows_object, const Tensor& out) {
  const Tensor starts(starts_object, "query_starts"), lens(lens_object, "context_lens"), rows(rows_object, "rows");
  state.is(DType::kFloat32).has_shape({-1, -1, -1, -1}).is_contiguous();
  const int64_t heads = state.size(1), key_dim = state.size(2), value_dim = state.size(3);
  qkv.is_floating().has_shape({-1, -1}).has_rows();
  const int64_t num_tokens = qkv.size(0), keys = qkv.size(1) - heads * value_dim;
  if (keys <= 0 || keys % (2 * key_dim) != 0 || heads % (keys / (2 * key_dim)) != 0) {
    raise_value_error("qkv must have a query and a key for each key head, and as many value heads for each of them");
  }
  gate.same_dtype(qkv).has_shape({num_tokens, heads * value_dim}).has_rows();
  decay.same_dtype(qkv).has_shape({num_tokens, heads}).has_rows();
  conv.is(DType::kFloat32).has_shape({qkv.size(1), -1}).is_contiguous();
  if (conv.size(1) < 1 || conv.size(1) > kMostTaps) raise_value_error("a convolution sees 1 to 16 tokens");
  decay_log.is(DType::kFloat32).has_shape({heads}).is_contiguous();
  decay_offset.is(DType::kFloat32).has_shape({heads}).is_contiguous();
  recent.same_dtype(qkv).has_shape({state.size(0), conv.size(1) - 1, qkv.size(1)}).is_contiguous();
  starts.is(DType::kInt32).has_shape({-1}).is_contiguous();
  if (starts.size(0) < 1) raise_value_error("query_starts must run from 0 to the number of tokens");
  lens.is(DType::kInt32).has_shape({starts.size(0) - 1}).is_contiguous();
  rows.is(DType::kInt32).has_shape({starts.size(0) - 1}).is_contiguous();
  out.same_dtype(qkv).has_shape({num_tokens, heads * value_dim}).is_contiguous();
  LinearAttentionArgs args = {};
  args.dtype = qkv.dtype();
  args.qkv = qkv.data();
  args.qkv_stride = qkv.row_stride();
  args.gate = gate.data();
  args.gate_stride = gate.row_stride();
  args.decay = decay.data();
  args.decay_stride = decay.row_stride();
  args.conv = conv.as<float>();
  args.decay_log = decay_log.as<float>();
  args.decay_offset = decay_offset.as<float>();
  args.state = state.as<float>();
  args.recent = recent.data();
  args.query_starts = starts.as<int32_t>();
  args.context_lens = lens.as<int32_t>();
  args.rows = rows.as<int32_t>();
  args.out = out.data();
  args.num_sequences = lens.size(0);
  args.num_key_heads = keys / (2 * key_dim);
  args.num_value_heads = heads;
  args.key_dim = key_dim;
  args.value_dim = value_dim;
  args.num_taps = conv.size(1);
  return args;
}

void perform_rows(const LinearAttentionArgs& args, int64_t num_tokens, int64_t num_rows) {
  perform([args, num_tokens, num_rows] {
    check_rows(args, num_tokens, num_rows);
    kernels().linear_attention(args);
  });
}

void delta_rule(nb::handle qkv_object, nb::handle gate_object, nb::handle beta_object, nb::handle decay_object,
                nb::handle conv_object, nb::handle decay_log_object, nb::handle decay_offset_object,
                nb::handle norm_object, nb::handle state_object, nb::handle recent_object, nb::handle query_starts,
                nb::handle context_lens, nb::handle rows, nb::handle out_object, float eps) {
  const Tensor qkv(qkv_object, "qkv"), gate(gate_object, "gate"), beta(beta_object, "beta");
  const Tensor decay(decay_object, "decay"), conv(conv_object, "conv"), norm(norm_object, "norm");
  const Tensor decay_log(decay_log_object, "decay_log"), decay_offset(decay_offset_object, "decay_offset");
  const Tensor state(state_object, "state"), recent(recent_object, "recent"), out(out_object, "out");
  LinearAttentionArgs args = shared_args(qkv, gate, decay, conv, decay_log, decay_offset, state, recent, query_starts,
                                         context_lens, rows, out);
  args.beta = beta.same_dtype(qkv).has_shape({qkv.size(0), args.num_value_heads}).has_rows().data();
  args.beta_stride = beta.row_stride();
  args.norm = norm.same_dtype(qkv).has_shape({args.value_dim}).is_contiguous().data();
  args.eps = eps;
  perform_rows(args, qkv.size(0), state.size(0));
}

void mamba(nb::handle qkv_object, nb::handle gate_object, nb::handle step_object, nb::handle conv_object,
           nb::handle conv_bias_object, nb::handle decay_log_object, nb::handle step_offset_object,
           nb::handle skip_object, nb::handle norm_object, nb::handle state_object, nb::handle recent_object,
           nb::handle query_starts, nb::handle context_lens, nb::handle rows, nb::handle out_object, float eps) {
  const Tensor qkv(qkv_object, "qkv"), gate(gate_object, "gate"), step(step_object, "step");
  const Tensor conv(conv_object, "conv"), norm(norm_object, "norm"), skip(skip_object, "skip");
  const Tensor decay_log(decay_log_object, "decay_log"), step_offset(step_offset_object, "step_offset");
  const Tensor state(state_object, "state"), recent(recent_object, "recent"), out(out_object, "out");
  LinearAttentionArgs args =
      shared_args(qkv, gate, step, conv, decay_log, step_offset, state, recent, query_starts, context_lens, rows, out);
  if (!conv_bias_object.is_none()) {
    const Tensor conv_bias(conv_bias_object, "conv_bias");
    args.conv_bias = conv_bias.is(DType::kFloat32).has_shape({qkv.size(1)}).is_contiguous().as<float>();
  }
  args.skip = skip.is(DType::kFloat32).has_shape({args.num_value_heads}).is_contiguous().as<float>();
  args.norm = norm.same_dtype(qkv).has_shape({args.num_value_heads * args.value_dim}).is_contiguous().data();
  args.eps = eps;
  perform_rows(args, qkv.size(0), state.size(0));
}

}  // namespace

void bind_linear_attention(nb::module_& m) {
  m.def("delta_rule", &delta_rule, "qkv"_a, "gate"_a, "beta"_a, "decay"_a, "conv"_a, "decay_log"_a, "decay_offset"_a,
        "norm"_a, "state"_a, "recent"_a, "query_starts"_a, "context_lens"_a, "rows"_a, "out"_a, "eps"_a);
  m.def("mamba", &mamba, "qkv"_a, "gate"_a, "step"_a, "conv"_a, "conv_bias"_a.none(), "decay_log"_a, "step_offset"_a,
        "skip"_a, "norm"_a, "state"_a, "recent"_a, "query_starts"_a, "context_lens"_a, "rows"_a, "out"_a, "eps"_a);
}

}  // namespace shardline
