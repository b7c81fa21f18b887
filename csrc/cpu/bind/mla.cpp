// Python entry points of multi-head latent attention: check the tensors, fill in the arguments, release the GIL.
#include <string>

#include "bind/attention_call.h"
#include "gemm/head_gemm.h"

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
  const HeadLinearArgs args = {x.dtype(),     x.data(),   x.row_stride(),   x.head_stride(),
                               panels.data(), out.data(), out.row_stride(), out.head_stride(),
                               x.size(0),     x.size(1),  out.size(2),      x.size(2)};
  perform([args] { linear_heads(args); });
}

// Checks a cache of latents: [num_blocks, block_size, latent_dim + rope_dim], or bytes of the latents alone, with the
// rotated parts in bf16 and scales beside it.
void check_latents(const Tensor& cache, nb::handle rope_object, nb::handle scales_object, DType dtype,
                   int64_t latent_dim, int64_t rope_dim) {
  const bool scaled = !scales_object.is_none();
  if (scaled == rope_object.is_none()) raise_value_error("latents in bytes need rope_cache and scales, others neither");
  cache.has_shape({-1, -1, latent_dim + (scaled ? 0 : rope_dim)}).is_contiguous();
  stored_type(cache, dtype, scaled);
  check_page_size(cache.size(1), cache.size(2), has_pairs(dtype));
  if (!scaled) return;
  cache_scales(scales_object, "scales", cache);
  const Tensor rope(rope_object, "rope_cache");
  rope.is(DType::kBFloat16).has_shape({cache.size(0), cache.size(1), rope_dim}).is_contiguous();
  check_page_size(rope.size(1), rope_dim, has_pairs(dtype));
}

void write_latent(nb::handle latent_object, nb::handle rope_key_object, nb::handle cache_object, nb::handle rope_cache,
                  nb::handle scales, nb::handle slots_object) {
  const Tensor latent(latent_object, "latent"), rope_key(rope_key_object, "rope_key");
  const Tensor cache(cache_object, "cache"), slots(slots_object, "slots");
  latent.is_floating().has_shape({-1, -1}).has_rows();
  rope_key.same_dtype(latent).has_shape({latent.size(0), -1}).has_rows();
  check_latents(cache, rope_cache, scales, latent.dtype(), latent.size(1), rope_key.size(1));
  slots.is(DType::kInt64).has_shape({latent.size(0)}).is_contiguous();
  WriteLatentArgs args = {
      latent.dtype(),  latent.data(), rope_key.data(), latent.row_stride(), rope_key.row_stride(), cache.dtype(),
      cache.data(),    nullptr,       nullptr,         slots.as<int64_t>(), latent.size(0),        latent.size(1),
      rope_key.size(1)};
  if (!scales.is_none()) {
    args.rope_cache = Tensor(rope_cache, "rope_cache").as<bf16>();
    args.scales = Tensor(scales, "scales").as<float>();
  }
  perform([args, num_slots = cache.size(0) * cache.size(1)] {
    check_slots(args.slots, args.num_tokens, num_slots);
    kernels().write_latent(args);
  });
}

// The arguments of attention over latents, without where the result goes.
AttentionArgs latent_args(const Tensor& latent, const Tensor& rope, const Tensor& cache, nb::handle rope_cache,
                          nb::handle scales, const SequenceTensors& sequences, float scale) {
  latent.is_floating().has_shape({-1, -1, -1}).has_rows();
  rope.same_dtype(latent).has_shape({latent.size(0), latent.size(1), -1}).has_heads();
  check_latents(cache, rope_cache, scales, latent.dtype(), latent.size(2), rope.size(2));
  AttentionArgs args = attention_args(latent, sequences, scale);
  args.query_rope = rope.data();
  args.query_rope_stride = rope.row_stride();
  args.query_rope_head_stride = rope.head_stride();
  args.key_cache = cache.data();
  args.stored = cache.dtype();
  if (!scales.is_none()) {
    args.rope_cache = Tensor(rope_cache, "rope_cache").as<bf16>();
    args.key_scales = args.value_scales = Tensor(scales, "scales").as<float>();
  }
  args.num_kv_heads = 1;
  args.key_dim = latent.size(2) + rope.size(2);
  args.value_dim = latent.size(2);
  args.block_size = cache.size(1);
  return args;
}

void mla_attention(nb::handle query_latent_object, nb::handle query_rope_object, nb::handle cache_object,
                   nb::handle rope_cache, nb::handle scales, nb::handle block_tables_object,
                   nb::handle query_starts_object, nb::handle context_lens_object, nb::handle out_object, float scale) {
  const Tensor latent(query_latent_object, "query_latent"), rope(query_rope_object, "query_rope");
  const Tensor cache(cache_object, "cache"), out(out_object, "out");
  const SequenceTensors sequences(block_tables_object, query_starts_object, context_lens_object);
  AttentionArgs args = latent_args(latent, rope, cache, rope_cache, scales, sequences, scale);
  out.same_dtype(latent).has_shape({latent.size(0), latent.size(1), latent.size(2)}).is_contiguous();
  args.out = out.data();
  perform_attention(args, latent, sequences, cache);
}

void mla_partials(nb::handle query_latent_object, nb::handle query_rope_object, nb::handle cache_object,
                  nb::handle rope_cache, nb::handle scales, nb::handle block_tables_object,
                  nb::handle query_starts_object, nb::handle context_lens_object, nb::handle maxima, nb::handle sums,
                  nb::handle outputs, float scale, int64_t first_split, int64_t split_step) {
  const Tensor latent(query_latent_object, "query_latent"), rope(query_rope_object, "query_rope");
  const Tensor cache(cache_object, "cache");
  const SequenceTensors sequences(block_tables_object, query_starts_object, context_lens_object);
  AttentionArgs args = latent_args(latent, rope, cache, rope_cache, scales, sequences, scale);
  args.partials = partials_of(args, latent.size(0), maxima, sums, outputs, first_split, split_step);
  perform_attention(args, latent, sequences, cache);
}

}  // namespace

void bind_mla(nb::module_& m) {
  m.def("linear_heads", static_cast<void (*)(nb::handle, nb::handle, nb::handle)>(&linear_heads), "x"_a, "panels"_a,
        "out"_a);
  using WriteLatent = void (*)(nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle);
  m.def("write_latent", static_cast<WriteLatent>(&write_latent), "latent"_a, "rope_key"_a, "cache"_a,
        "rope_cache"_a.none(), "scales"_a.none(), "slots"_a);
  m.def("mla_attention", &mla_attention, "query_latent"_a, "query_rope"_a, "cache"_a, "rope_cache"_a.none(),
        "scales"_a.none(), "block_tables"_a, "query_starts"_a, "context_lens"_a, "out"_a, "scale"_a);
  m.def("mla_partials", &mla_partials, "query_latent"_a, "query_rope"_a, "cache"_a, "rope_cache"_a.none(),
        "scales"_a.none(), "block_tables"_a, "query_starts"_a, "context_lens"_a, "maxima"_a, "sums"_a, "outputs"_a,
        "scale"_a, "first_split"_a, "split_step"_a);
}

}  // namespace shardline
