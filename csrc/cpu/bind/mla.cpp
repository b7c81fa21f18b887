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

void choose_keys(nb::handle query_object, nb::handle weights_object, nb::handle keys_object,
                 nb::handle block_tables_object, nb::handle sequences_object, nb::handle contexts_object,
                 nb::handle slots_object) {
  const Tensor query(query_object, "query"), weights(weights_object, "weights"), keys(keys_object, "keys");
  const Tensor tables(block_tables_object, "block_tables"), sequences(sequences_object, "sequences");
  const Tensor contexts(contexts_object, "contexts"), slots(slots_object, "slots");
  query.is_floating().has_shape({-1, -1, -1}).has_heads();
  weights.is(DType::kFloat32).has_shape({query.size(0), query.size(1)}).has_rows();
  keys.same_dtype(query).has_shape({-1, -1, query.size(2)}).is_contiguous();
  tables.is(DType::kInt32).has_shape({-1, -1}).has_rows();
  sequences.is(DType::kInt32).has_shape({query.size(0)}).is_contiguous();
  contexts.is(DType::kInt32).has_shape({query.size(0)}).is_contiguous();
  slots.is(DType::kInt64).has_shape({query.size(0), -1}).is_contiguous();
  if (slots.size(1) < 1) raise_value_error("at least one key is chosen");
  ChooseKeysArgs args = {};
  args.rows = {query.dtype(),
               query.data(),
               query.row_stride(),
               query.head_stride(),
               weights.as<float>(),
               weights.row_stride(),
               keys.data(),
               tables.as<int32_t>(),
               tables.row_stride(),
               sequences.as<int32_t>(),
               contexts.as<int32_t>(),
               nullptr,
               0,
               query.size(0),
               query.size(1),
               query.size(2),
               keys.size(1),
               0};
  args.slots = slots.as<int64_t>();
  args.top_k = slots.size(1);
  perform([args, num_tables = tables.size(0), max_blocks = tables.size(1), num_blocks = keys.size(0)]() mutable {
    ScoreKeysArgs& rows = args.rows;
    rows.most_keys = 0;
    for (int64_t row = 0; row < rows.num_rows; ++row) {
      const int64_t context = rows.contexts[row], sequence = rows.sequences[row];
      if (sequence < 0 || sequence >= num_tables || context < args.top_k || context > max_blocks * rows.block_size) {
        raise_value_error("a row has fewer keys than are chosen, or more than its block table");
      }
      for (int64_t b = 0; b * rows.block_size < context; ++b) {
        const int32_t block = rows.block_tables[sequence * rows.table_stride + b];
        if (block < 0 || block >= num_blocks) raise_value_error("a block table names a block outside the KV cache");
      }
      rows.most_keys = rows.most_keys < context ? context : rows.most_keys;
    }
    choose_keys(args);
  });
}

void take_tokens(nb::handle pages_object, nb::handle slots_object, nb::handle out_object, int64_t word) {
  const Tensor pages(pages_object, "pages"), slots(slots_object, "slots"), out(out_object, "out");
  pages.has_shape({-1, -1, -1}).is_contiguous();
  slots.is(DType::kInt64).has_shape({-1}).is_contiguous();
  out.same_dtype(pages).has_shape({-1, 16, pages.size(2)}).is_contiguous();
  const int64_t itemsize = pages.dtype() == DType::kFloat32 ? 4 : pages.dtype() == DType::kBFloat16 ? 2 : 1;
  if (slots.size(0) != 16 * out.size(0)) raise_value_error("slots must fill the pages of out");
  if (pages.size(1) % 16 != 0) raise_value_error("a block has a multiple of 16 tokens");
  if ((word != 1 && word != 2) || pages.size(2) % word != 0 || word * itemsize > 4) {
    raise_value_error("a word has 1 or 2 elements, and a token whole words");
  }
  const TakeTokensArgs args = {pages.data(),  slots.as<int64_t>(),  out.data(),
                               slots.size(0), pages.size(2) / word, word * itemsize};
  perform([args, num_slots = pages.size(0) * pages.size(1)] {
    for (int64_t i = 0; i < args.num_slots; ++i) {
      if (args.slots[i] < 0 || args.slots[i] >= num_slots) raise_value_error("a slot lies outside the KV cache");
    }
    take_tokens(args);
  });
}

}  // namespace

void bind_mla(nb::module_& m) {
  using TakeTokens = void (*)(nb::handle, nb::handle, nb::handle, int64_t);
  m.def("take_tokens", static_cast<TakeTokens>(&take_tokens), "pages"_a, "slots"_a, "out"_a, "word"_a);
  using ChooseKeys = void (*)(nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle);
  m.def("choose_keys", static_cast<ChooseKeys>(&choose_keys), "query"_a, "weights"_a, "keys"_a, "block_tables"_a,
        "sequences"_a, "contexts"_a, "slots"_a);
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
