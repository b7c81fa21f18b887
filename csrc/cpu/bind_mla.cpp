// Python entry points of multi-head latent attention: check the tensors, fill in the arguments, let go of the GIL.
#include <string>

#include "bind.h"
#include "host_ops.h"
#include "kernels.h"
#include "tensor.h"

namespace shardline {
namespace {

using namespace nanobind::literals;

void linear_heads(nb::handle x_object, nb::handle panels_object, nb::handle out_object) {
  const Tensor x(x_object, "x"), panels(panels_object, "panels"), out(out_object, "out");
  x.is_floating().has_shape({-1, -1, -1}).has_heads().same_dtype(panels);
  out.same_dtype(x).has_shape({x.size(0), x.size(1), -1}).has_heads();
  const int64_t padded_depth = x.dtype() == DType::kBFloat16 ? (x.size(2) + 1) / 2 * 2 : x.size(2);
  const int64_t num_panels = (out.size(2) + kPanelColumns - 1) / kPanelColumns;
  panels.has_shape({x.size(1), num_panels, padded_depth, kPanelColumns}).is_contiguous();
  if (x.size(2) < 1) raise_value_error("a weight needs at least one input feature");
  const HeadLinearArgs args = {x.dtype(), x.data(), x.row_stride(), x.head_stride(), panels.data(), out.data(),
                               out.row_stride(), out.head_stride(), x.size(0), x.size(1), out.size(2), x.size(2)};
  nb::gil_scoped_release release;
  linear_heads(args);
}

void write_latent(nb::handle latent_object, nb::handle rope_key_object, nb::handle cache_object,
                  nb::handle slots_object) {
  const Tensor latent(latent_object, "latent"), rope_key(rope_key_object, "rope_key");
  const Tensor cache(cache_object, "cache"), slots(slots_object, "slots");
  latent.is_floating().has_shape({-1, -1}).has_rows();
  rope_key.same_dtype(latent).has_shape({latent.size(0), -1}).has_rows();
  cache.same_dtype(latent).has_shape({-1, -1, latent.size(1) + rope_key.size(1)}).is_contiguous();
  slots.is(DType::kInt64).has_shape({latent.size(0)}).is_contiguous();
  for (int64_t token = 0; token < slots.size(0); ++token) {
    if (slots.as<int64_t>()[token] >= cache.size(0) * cache.size(1)) {
      raise_value_error("a slot lies outside the KV cache");
    }
  }
  const WriteLatentArgs args = {element_size(latent.dtype()), latent.data(), rope_key.data(), latent.row_stride(),
                                rope_key.row_stride(), cache.data(), slots.as<int64_t>(), latent.size(0),
                                latent.size(1), rope_key.size(1)};
  nb::gil_scoped_release release;
  write_latent(args);
}

// A wrong index would read foreign memory, so every block that will be read is checked.
void check_sequences(const MlaAttentionArgs& args, int64_t num_tokens, int64_t max_blocks, int64_t num_blocks) {
  if (args.query_starts[0] != 0 || args.query_starts[args.num_sequences] != num_tokens) {
    raise_value_error("query_starts must run from 0 to the number of tokens");
  }
  for (int64_t s = 0; s < args.num_sequences; ++s) {
    const int64_t query_len = args.query_starts[s + 1] - args.query_starts[s];
    const int64_t context_len = args.context_lens[s];
    if (query_len < 0 || context_len < query_len || context_len > max_blocks * args.block_size) {
      raise_value_error("sequence " + std::to_string(s) + ": context length " + std::to_string(context_len) +
                        " does not fit " + std::to_string(query_len) + " query tokens and the block table");
    }
    for (int64_t b = 0; query_len > 0 && b * args.block_size < context_len; ++b) {
      const int32_t block = args.block_tables[s * args.block_table_stride + b];
      if (block < 0 || block >= num_blocks) raise_value_error("a block table names a block outside the KV cache");
    }
  }
}

void mla_attention(nb::handle query_latent_object, nb::handle query_rope_object, nb::handle cache_object,
                   nb::handle block_tables_object, nb::handle query_starts_object, nb::handle context_lens_object,
                   nb::handle out_object, float scale) {
  const Tensor latent(query_latent_object, "query_latent"), rope(query_rope_object, "query_rope");
  const Tensor cache(cache_object, "cache"), out(out_object, "out");
  const Tensor block_tables(block_tables_object, "block_tables"), query_starts(query_starts_object, "query_starts");
  const Tensor context_lens(context_lens_object, "context_lens");
  latent.is_floating().has_shape({-1, -1, -1}).has_rows();
  rope.same_dtype(latent).has_shape({latent.size(0), latent.size(1), -1}).has_heads();
  cache.same_dtype(latent).has_shape({-1, -1, latent.size(2) + rope.size(2)}).is_contiguous();
  out.same_dtype(latent).has_shape({latent.size(0), latent.size(1), latent.size(2)}).is_contiguous();
  context_lens.is(DType::kInt32).has_shape({-1}).is_contiguous();
  block_tables.is(DType::kInt32).has_shape({context_lens.size(0), -1}).has_rows();
  query_starts.is(DType::kInt32).has_shape({context_lens.size(0) + 1}).is_contiguous();
  const MlaAttentionArgs args = {latent.dtype(), latent.data(), latent.row_stride(), rope.data(), rope.row_stride(),
                                 rope.head_stride(), cache.data(), block_tables.as<int32_t>(),
                                 block_tables.row_stride(), query_starts.as<int32_t>(), context_lens.as<int32_t>(),
                                 out.data(), context_lens.size(0), latent.size(1), latent.size(2), rope.size(2),
                                 cache.size(1), scale};
  check_sequences(args, latent.size(0), block_tables.size(1), cache.size(0));
  nb::gil_scoped_release release;
  kernels().mla_attention(args);
}

}  // namespace

void bind_mla(nb::module_& m) {
  m.def("linear_heads", static_cast<void (*)(nb::handle, nb::handle, nb::handle)>(&linear_heads), "x"_a, "panels"_a,
        "out"_a);
  m.def("write_latent", static_cast<void (*)(nb::handle, nb::handle, nb::handle, nb::handle)>(&write_latent),
        "latent"_a, "rope_key"_a, "cache"_a, "slots"_a);
  m.def("mla_attention", &mla_attention, "query_latent"_a, "query_rope"_a, "cache"_a, "block_tables"_a,
        "query_starts"_a, "context_lens"_a, "out"_a, "scale"_a);
}

}  // namespace shardline
