// Python entry points of rotary embedding and of the KV cache: check the tensors, fill in the arguments.
#include <string>

#include "bind/bind.h"
#include "bind/checks.h"
#include "bind/tensor.h"
#include "dispatch/kernels.h"
#include "runtime/program.h"

namespace shardline {
namespace {

using namespace nanobind::literals;

void check_positions(const Rotation& rotation, int64_t num_tokens, int64_t num_positions) {
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int64_t position = rotation.positions_are_int64 ? static_cast<const int64_t*>(rotation.positions)[token]
                                                          : static_cast<const int32_t*>(rotation.positions)[token];
    if (position < 0 || position >= num_positions) {
      raise_value_error("position " + std::to_string(position) + " is outside the rotary table");
    }
  }
}

// The rotation of heads x [num_tokens, num_heads, head_dim].
Rotation rotation_of(const Tensor& x, const Tensor& positions, const Tensor& table, bool interleaved) {
  positions.has_shape({x.size(0)}).is_contiguous();
  table.is(DType::kFloat32).has_shape({-1, -1}).is_contiguous();
  if (positions.dtype() != DType::kInt32) positions.is(DType::kInt64);
  if (table.size(1) % 2 != 0 || table.size(1) > x.size(2)) {
    raise_value_error("the table's width must be even and at most the head's width");
  }
  return {positions.data(), positions.dtype() == DType::kInt64, table.as<float>(), table.size(1) / 2, interleaved};
}

void apply_rope(nb::handle x_object, nb::handle positions_object, nb::handle table_object, bool interleaved) {
  const Tensor x(x_object, "x"), positions(positions_object, "positions"), table(table_object, "table");
  x.is_floating().has_shape({-1, -1, -1}).has_heads();
  const RopeArgs args = {
      x.dtype(), x.data(), x.row_stride(), x.head_stride(), rotation_of(x, positions, table, interleaved),
      x.size(0), x.size(1)};
  perform([args, num_positions = table.size(0)] {
    check_positions(args.rotation, args.num_tokens, num_positions);
    kernels().rope(args);
  });
}

// Fills in all arguments except the query and the rotation.
WriteKvArgs write_args(const Tensor& key, nb::handle value_object, const Tensor& key_cache,
                       nb::handle value_cache_object, nb::handle slots_object, nb::handle key_scales_object,
                       nb::handle value_scales_object) {
  const Tensor value(value_object, "value"), value_cache(value_cache_object, "value_cache");
  const Tensor slots(slots_object, "slots");
  key.is_floating().has_shape({-1, -1, -1}).has_rows();
  value.same_dtype(key).has_shape({key.size(0), key.size(1), -1}).has_rows();
  const bool scaled = !key_scales_object.is_none();
  value_cache.same_dtype(key_cache);
  key_cache.has_shape({-1, key.size(1), -1, key.size(2)}).is_contiguous();
  value_cache.has_shape({key_cache.size(0), key.size(1), key_cache.size(2), value.size(2)}).is_contiguous();
  check_page_size(key_cache.size(2), key.size(2), has_pairs(key.dtype()));
  check_page_size(key_cache.size(2), value.size(2), has_pairs(key.dtype()));
  slots.is(DType::kInt64).has_shape({key.size(0)}).is_contiguous();
  WriteKvArgs args = {};
  args.dtype = key.dtype();
  args.stored = stored_type(key_cache, key.dtype(), scaled);
  args.key = key.data();
  args.value = value.data();
  args.key_stride = key.row_stride();
  args.value_stride = value.row_stride();
  args.key_cache = key_cache.data();
  args.value_cache = value_cache.data();
  if (scaled) {
    args.key_scales = cache_scales(key_scales_object, "key_scales", key_cache);
    args.value_scales = cache_scales(value_scales_object, "value_scales", value_cache);
  }
  args.slots = slots.as<int64_t>();
  args.num_tokens = key.size(0);
  args.num_kv_heads = key.size(1);
  args.key_dim = key.size(2);
  args.value_dim = value.size(2);
  args.block_size = key_cache.size(2);
  return args;
}

int64_t num_slots(const Tensor& cache) { return cache.size(0) * cache.size(2); }

void write_kv(nb::handle key_object, nb::handle value, nb::handle key_cache_object, nb::handle value_cache,
              nb::handle slots, nb::handle key_scales, nb::handle value_scales) {
  const Tensor key(key_object, "key"), key_cache(key_cache_object, "key_cache");
  const WriteKvArgs args = write_args(key, value, key_cache, value_cache, slots, key_scales, value_scales);
  perform([args, num_slots = num_slots(key_cache)] {
    check_slots(args.slots, args.num_tokens, num_slots);
    kernels().write_kv(args);
  });
}

void rope_and_write_kv(nb::handle query_object, nb::handle key_object, nb::handle value, nb::handle key_cache_object,
                       nb::handle value_cache, nb::handle positions_object, nb::handle slots, nb::handle table_object,
                       bool interleaved, nb::handle key_scales, nb::handle value_scales) {
  const Tensor query(query_object, "query"), key(key_object, "key"), key_cache(key_cache_object, "key_cache");
  const Tensor positions(positions_object, "positions"), table(table_object, "table");
  WriteKvArgs args = write_args(key, value, key_cache, value_cache, slots, key_scales, value_scales);
  query.same_dtype(key).has_shape({key.size(0), -1, key.size(2)}).has_rows();
  args.rotation = rotation_of(key, positions, table, interleaved);
  args.query = query.data();
  args.query_stride = query.row_stride();
  args.num_heads = query.size(1);
  perform([args, num_positions = table.size(0), num_slots = num_slots(key_cache)] {
    check_positions(args.rotation, args.num_tokens, num_positions);
    check_slots(args.slots, args.num_tokens, num_slots);
    kernels().write_kv(args);
  });
}

}  // namespace

bool has_pairs(DType dtype) { return dtype == DType::kBFloat16 && kernels().multiplies_pairs(); }

void check_page_size(int64_t block_size, int64_t dim, bool pairs) {
  if (block_size % 16 != 0) {
    raise_value_error("a block of " + std::to_string(block_size) + " tokens: the block size must be a multiple of 16");
  }
  if (pairs && dim % 2 != 0) {
    raise_value_error("keys of " + std::to_string(dim) + " elements: in bf16 their number must be even");
  }
}

DType stored_type(const Tensor& cache, DType dtype, bool scaled) {
  if (!scaled) return cache.is(dtype).dtype();
  return cache.dtype() == DType::kFloat8E4m3 ? DType::kFloat8E4m3 : cache.is(DType::kInt8).dtype();
}

float* cache_scales(nb::handle object, const char* name, const Tensor& cache) {
  const Tensor scales(object, name);
  scales.is(DType::kFloat32).is_contiguous();
  if (cache.rank() == 3) {
    scales.has_shape({cache.size(0), cache.size(1)});
  } else {
    scales.has_shape({cache.size(0), cache.size(1), cache.size(2)});
  }
  return scales.as<float>();
}

void bind_kv_cache(nb::module_& m) {
  m.def("apply_rope", &apply_rope, "x"_a, "positions"_a, "table"_a, "interleaved"_a);
  m.def("multiplies_pairs", [] { return kernels().multiplies_pairs(); });
  m.def("write_kv", &write_kv, "key"_a, "value"_a, "key_cache"_a, "value_cache"_a, "slots"_a, "key_scales"_a.none(),
        "value_scales"_a.none());
  m.def("rope_and_write_kv", &rope_and_write_kv, "query"_a, "key"_a, "value"_a, "key_cache"_a, "value_cache"_a,
        "positions"_a, "slots"_a, "table"_a, "interleaved"_a, "key_scales"_a.none(), "value_scales"_a.none());
}

}  // namespace shardline
