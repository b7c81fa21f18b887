// The Python entry point of paged attention: checks the tensors, fills in the arguments, releases the GIL.
#include <nanobind/stl/optional.h>

#include <optional>

#include "bind/attention_call.h"

namespace shardline {
namespace {

using namespace nanobind::literals;

// The arguments of attention over keys and values of each head; `out` is not set.
AttentionArgs paged_args(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                         const SequenceTensors& sequences, float scale, std::optional<int64_t> window,
                         std::optional<float> softcap, nb::handle key_scales_object, nb::handle value_scales_object,
                         bool chunked) {
  query.is_floating().has_shape({-1, -1, -1}).has_rows();
  const bool scaled = !key_scales_object.is_none();
  const DType stored = stored_type(key_cache, query.dtype(), scaled);
  value_cache.same_dtype(key_cache);
  key_cache.has_shape({-1, -1, -1, query.size(2)}).is_contiguous();
  value_cache.has_shape({key_cache.size(0), key_cache.size(1), key_cache.size(2), -1}).is_contiguous();
  check_page_size(key_cache.size(2), key_cache.size(3), has_pairs(query.dtype()));
  check_page_size(value_cache.size(2), value_cache.size(3), has_pairs(query.dtype()));
  if (key_cache.size(1) == 0 || query.size(1) % key_cache.size(1) != 0) {
    raise_value_error("the number of query heads must be a multiple of the number of KV heads");
  }
  if (window && *window < 1) raise_value_error("window must be at least 1, or None");
  if (chunked && !window) raise_value_error("chunked attention needs the size of a chunk (window)");
  AttentionArgs args = attention_args(query, sequences, scale);
  args.key_cache = key_cache.data();
  args.value_cache = value_cache.data();
  args.num_kv_heads = key_cache.size(1);
  args.key_dim = query.size(2);
  args.value_dim = value_cache.size(3);
  args.block_size = key_cache.size(2);
  args.window = window.value_or(0);
  args.chunked = chunked;
  args.softcap = softcap.value_or(0.0f);
  args.stored = stored;
  if (scaled) {
    args.key_scales = cache_scales(key_scales_object, "key_scales", key_cache);
    args.value_scales = cache_scales(value_scales_object, "value_scales", value_cache);
  }
  return args;
}

const float* sink_scores(nb::handle object, int64_t num_heads) {
  if (object.is_none()) return nullptr;
  return Tensor(object, "sinks").is(DType::kFloat32).has_shape({num_heads}).is_contiguous().as<float>();
}

void paged_attention(nb::handle query_object, nb::handle key_cache_object, nb::handle value_cache_object,
                     nb::handle block_tables_object, nb::handle query_starts_object, nb::handle context_lens_object,
                     nb::handle out_object, float scale, std::optional<int64_t> window, std::optional<float> softcap,
                     nb::handle key_scales, nb::handle value_scales, nb::handle sinks, bool chunked) {
  const Tensor query(query_object, "query"), out(out_object, "out");
  const Tensor key_cache(key_cache_object, "key_cache"), value_cache(value_cache_object, "value_cache");
  const SequenceTensors sequences(block_tables_object, query_starts_object, context_lens_object);
  AttentionArgs args =
      paged_args(query, key_cache, value_cache, sequences, scale, window, softcap, key_scales, value_scales, chunked);
  out.same_dtype(query).has_shape({query.size(0), query.size(1), value_cache.size(3)}).is_contiguous();
  args.out = out.data();
  args.sinks = sink_scores(sinks, query.size(1));
  perform_attention(args, query, sequences, key_cache);
}

void attention_partials(nb::handle query_object, nb::handle key_cache_object, nb::handle value_cache_object,
                        nb::handle block_tables_object, nb::handle query_starts_object, nb::handle context_lens_object,
                        nb::handle maxima, nb::handle sums, nb::handle outputs, float scale,
                        std::optional<int64_t> window, std::optional<float> softcap, nb::handle key_scales,
                        nb::handle value_scales, bool chunked, int64_t first_split, int64_t split_step) {
  const Tensor query(query_object, "query");
  const Tensor key_cache(key_cache_object, "key_cache"), value_cache(value_cache_object, "value_cache");
  const SequenceTensors sequences(block_tables_object, query_starts_object, context_lens_object);
  AttentionArgs args =
      paged_args(query, key_cache, value_cache, sequences, scale, window, softcap, key_scales, value_scales, chunked);
  args.partials = partials_of(args, query.size(0), maxima, sums, outputs, first_split, split_step);
  perform_attention(args, query, sequences, key_cache);
}

void merge_partials(nb::handle maxima_object, nb::handle sums_object, nb::handle outputs_object, nb::handle out_object,
                    nb::handle sinks) {
  const Tensor maxima(maxima_object, "maxima"), sums(sums_object, "sums"), outputs(outputs_object, "outputs");
  const Tensor out(out_object, "out");
  out.is_floating().has_shape({-1, -1, -1}).is_contiguous();
  maxima.is(DType::kFloat32).has_shape({-1, -1, out.size(0), out.size(1)}).is_contiguous();
  sums.is(DType::kFloat32).has_shape({maxima.size(0), maxima.size(1), out.size(0), out.size(1)}).is_contiguous();
  outputs.is(DType::kFloat32)
      .has_shape({maxima.size(0), maxima.size(1), out.size(0), out.size(1), out.size(2)})
      .is_contiguous();
  const MergePartialsArgs args = {
      out.dtype(), maxima.as<float>(), sums.as<float>(), outputs.as<float>(), sink_scores(sinks, out.size(1)),
      out.data(),  maxima.size(0),     maxima.size(1),   out.size(0),         out.size(1),
      out.size(2)};
  perform([args] { kernels().merge_partials(args); });
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("paged_attention", &paged_attention, "query"_a, "key_cache"_a, "value_cache"_a, "block_tables"_a,
        "query_starts"_a, "context_lens"_a, "out"_a, "scale"_a, "window"_a.none(), "softcap"_a.none(),
        "key_scales"_a.none(), "value_scales"_a.none(), "sinks"_a.none(), "chunked"_a);
  m.def("attention_partials", &attention_partials, "query"_a, "key_cache"_a, "value_cache"_a, "block_tables"_a,
        "query_starts"_a, "context_lens"_a, "maxima"_a, "sums"_a, "outputs"_a, "scale"_a, "window"_a.none(),
        "softcap"_a.none(), "key_scales"_a.none(), "value_scales"_a.none(), "chunked"_a, "first_split"_a,
        "split_step"_a);
  m.def("merge_partials", &merge_partials, "maxima"_a, "sums"_a, "outputs"_a, "out"_a, "sinks"_a.none());
}

}  // namespace shardline
