// The Python entry point of paged attention: checks the tensors, fills in the arguments, releases the GIL.
#include <nanobind/stl/optional.h>

#include <optional>

#include "bind/attention_call.h"

namespace shardline {
namespace {

using namespace nanobind::literals;

void paged_attention(nb::handle query_object, nb::handle key_cache_object, nb::handle value_cache_object,
                     nb::handle block_tables_object, nb::handle query_starts_object, nb::handle context_lens_object,
                     nb::handle out_object, float scale, std::optional<int64_t> window, std::optional<float> softcap,
                     nb::handle key_scales_object, nb::handle value_scales_object, nb::handle sinks_object,
                     bool chunked) {
  const Tensor query(query_object, "query"), out(out_object, "out");
  const Tensor key_cache(key_cache_object, "key_cache"), value_cache(value_cache_object, "value_cache");
  const SequenceTensors sequences(block_tables_object, query_starts_object, context_lens_object);
  query.is_floating().has_shape({-1, -1, -1}).has_rows();
  const bool scaled = !key_scales_object.is_none();
  const DType stored = stored_type(key_cache, query.dtype(), scaled);
  value_cache.same_dtype(key_cache);
  key_cache.has_shape({-1, -1, -1, query.size(2)}).is_contiguous();
  value_cache.has_shape({key_cache.size(0), key_cache.size(1), key_cache.size(2), -1}).is_contiguous();
  check_page_size(key_cache.size(2), key_cache.size(3), has_pairs(query.dtype()));
  check_page_size(value_cache.size(2), value_cache.size(3), has_pairs(query.dtype()));
  out.same_dtype(query).has_shape({query.size(0), query.size(1), value_cache.size(3)}).is_contiguous();
  if (key_cache.size(1) == 0 || query.size(1) % key_cache.size(1) != 0) {
    raise_value_error("the number of query heads must be a multiple of the number of KV heads");
  }
  if (window && *window < 1) raise_value_error("window must be at least 1, or None");
  if (chunked && !window) raise_value_error("chunked attention needs the size of a chunk (window)");
  AttentionArgs args = attention_args(query, sequences, out, scale);
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
  if (!sinks_object.is_none()) {
    const Tensor sinks(sinks_object, "sinks");
    args.sinks = sinks.is(DType::kFloat32).has_shape({query.size(1)}).is_contiguous().as<float>();
  }
  perform_attention(args, query, sequences, key_cache);
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("paged_attention", &paged_attention, "query"_a, "key_cache"_a, "value_cache"_a, "block_tables"_a,
        "query_starts"_a, "context_lens"_a, "out"_a, "scale"_a, "window"_a.none(), "softcap"_a.none(),
        "key_scales"_a.none(), "value_scales"_a.none(), "sinks"_a.none(), "chunked"_a);
}

}  // namespace shardline
