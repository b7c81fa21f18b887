// What the Python entry points of all kinds of attention share.
#pragma once

#include "bind/bind.h"
#include "bind/checks.h"
#include "bind/tensor.h"
#include "dispatch/kernels.h"
#include "runtime/program.h"

namespace shardline {

// The tensors that say which tokens and blocks belong to which sequence.
struct SequenceTensors {
  const Tensor block_tables, query_starts, context_lens;

  SequenceTensors(nb::handle tables, nb::handle starts, nb::handle lens)
      : block_tables(tables, "block_tables"), query_starts(starts, "query_starts"), context_lens(lens, "context_lens") {
    context_lens.is(DType::kInt32).has_shape({-1}).is_contiguous();
    block_tables.is(DType::kInt32).has_shape({context_lens.size(0), -1}).has_rows();
    query_starts.is(DType::kInt32).has_shape({context_lens.size(0) + 1}).is_contiguous();
  }
};

// The arguments that do not depend on the kind of the cache. `query` is [num_tokens, num_heads, dim].
inline AttentionArgs attention_args(const Tensor& query, const SequenceTensors& sequences, float scale) {
  if (!(scale > 0)) raise_value_error("scale must be positive");
  AttentionArgs args = {};
  args.dtype = query.dtype();
  args.query = query.data();
  args.query_stride = query.row_stride();
  args.block_tables = sequences.block_tables.as<int32_t>();
  args.block_table_stride = sequences.block_tables.row_stride();
  args.query_starts = sequences.query_starts.as<int32_t>();
  args.context_lens = sequences.context_lens.as<int32_t>();
  args.num_sequences = sequences.context_lens.size(0);
  args.num_heads = query.size(1);
  args.scale = scale;
  return args;
}

// Where the results of some splits of `num_tokens` tokens go, in place of `out`.
inline AttentionPartials partials_of(const AttentionArgs& args, int64_t num_tokens, nb::handle maxima_object,
                                     nb::handle sums_object, nb::handle outputs_object, int64_t first_split,
                                     int64_t split_step) {
  const Tensor maxima(maxima_object, "maxima"), sums(sums_object, "sums"), outputs(outputs_object, "outputs");
  maxima.is(DType::kFloat32).has_shape({-1, num_tokens, args.num_heads}).is_contiguous();
  sums.is(DType::kFloat32).has_shape({maxima.size(0), num_tokens, args.num_heads}).is_contiguous();
  outputs.is(DType::kFloat32).has_shape({maxima.size(0), num_tokens, args.num_heads, args.value_dim}).is_contiguous();
  if (first_split < 0 || split_step < 1) raise_value_error("splits are counted from 0 on, in steps of at least 1");
  return {maxima.as<float>(), sums.as<float>(), outputs.as<float>(), maxima.size(0), first_split, split_step};
}

inline void perform_attention(const AttentionArgs& args, const Tensor& query, const SequenceTensors& sequences,
                              const Tensor& cache) {
  perform([args, num_tokens = query.size(0), max_blocks = sequences.block_tables.size(1), num_blocks = cache.size(0)] {
    check_sequences(args, num_tokens, max_blocks, num_blocks);
    kernels().paged_attention(args);
  });
}

}  // namespace shardline
