// Writes a step's inputs from what is known of its sequences: positions and lengths in one call, block tables and slots
// in another. More calls would be slow, because the thread that prepares a decode step finds cold caches.
#include <nanobind/stl/vector.h>

#include <cstring>
#include <vector>

#include "bind/bind.h"
#include "bind/tensor.h"

namespace shardline {
namespace {

using namespace nanobind::literals;

using Integers = std::vector<int64_t>;

int64_t check_steps(const Integers& starts, const Integers& lengths) {
  if (starts.size() != lengths.size()) raise_value_error("starts and lengths must be as many");
  int64_t num_tokens = 0;
  for (size_t s = 0; s < starts.size(); ++s) {
    if (starts[s] < 0 || lengths[s] < 1) raise_value_error("a sequence's step needs a start and a token");
    num_tokens += lengths[s];
  }
  return num_tokens;
}

void lay_out_tokens(const Integers& starts, const Integers& lengths, nb::handle positions_object,
                    nb::handle query_starts_object, nb::handle context_lens_object) {
  const Tensor positions(positions_object, "positions"), query_starts(query_starts_object, "query_starts");
  const Tensor context_lens(context_lens_object, "context_lens");
  const auto num_seqs = static_cast<int64_t>(starts.size());
  positions.is(DType::kInt64).has_shape({check_steps(starts, lengths)}).is_contiguous();
  query_starts.is(DType::kInt32).has_shape({num_seqs + 1}).is_contiguous();
  context_lens.is(DType::kInt32).has_shape({num_seqs}).is_contiguous();
  int64_t* position = positions.as<int64_t>();
  int32_t* query_start = query_starts.as<int32_t>();
  *query_start = 0;
  for (size_t s = 0; s < starts.size(); ++s, ++query_start) {
    for (int64_t i = 0; i < lengths[s]; ++i) *position++ = starts[s] + i;
    query_start[1] = query_start[0] + static_cast<int32_t>(lengths[s]);
    context_lens.as<int32_t>()[s] = static_cast<int32_t>(starts[s] + lengths[s]);
  }
}

void lay_out_blocks(nb::handle table_object, const Integers& rows, const Integers& starts, const Integers& lengths,
                    int64_t block_size, nb::handle block_tables_object, nb::handle slots_object) {
  const Tensor table(table_object, "table"), block_tables(block_tables_object, "block_tables");
  const Tensor slots(slots_object, "slots");
  const auto num_seqs = static_cast<int64_t>(starts.size());
  if (rows.size() != starts.size()) raise_value_error("rows and starts must be as many");
  if (block_size < 1) raise_value_error("block_size must be positive");
  table.is(DType::kInt32).has_shape({-1, -1}).is_contiguous();
  block_tables.is(DType::kInt32).has_shape({num_seqs, -1}).is_contiguous();
  slots.is(DType::kInt64).has_shape({check_steps(starts, lengths)}).is_contiguous();
  int64_t* slot = slots.as<int64_t>();
  for (size_t s = 0; s < starts.size(); ++s) {
    const int64_t end = starts[s] + lengths[s], num_blocks = (end + block_size - 1) / block_size;
    if (rows[s] < 0 || rows[s] >= table.size(0)) raise_value_error("a row lies outside the table");
    if (num_blocks > table.size(1) || num_blocks > block_tables.size(1)) {
      raise_value_error("a sequence has more blocks than the table or block_tables have columns");
    }
    const int32_t* blocks = table.as<int32_t>() + rows[s] * table.size(1);
    std::memcpy(block_tables.as<int32_t>() + static_cast<int64_t>(s) * block_tables.size(1), blocks,
                static_cast<size_t>(num_blocks) * sizeof(int32_t));
    for (int64_t position = starts[s]; position < end; ++position) {
      *slot++ = blocks[position / block_size] * block_size + position % block_size;
    }
  }
}

}  // namespace

void bind_steps(nb::module_& m) {
  m.def("lay_out_tokens", &lay_out_tokens, "starts"_a, "lengths"_a, "positions"_a, "query_starts"_a, "context_lens"_a);
  m.def("lay_out_blocks", &lay_out_blocks, "table"_a, "rows"_a, "starts"_a, "lengths"_a, "block_size"_a,
        "block_tables"_a, "slots"_a);
}

}  // namespace shardline
