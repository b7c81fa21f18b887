// The kernels that exist once per ISA, and the table through which the rest of the code calls them.
#pragma once

#include "adapters/low_rank_args.h"
#include "attention/attention_args.h"
#include "attention/choose_keys_args.h"
#include "attention/linear_attention_args.h"
#include "dispatch/kernel_list.h"
#include "gemm/gemm_args.h"
#include "moe/combine_args.h"
#include "rowwise/rowwise_args.h"

namespace shardline {

// exp_shifted: out[i] = exp((logits[i] - shift) * scale), and 0 for NaN; out may be logits.
// mask_logits: logits whose bit is 0 become -inf; logit i has bit i % 32 of word i / 32.
// hash_row: see runtime/ops/sampling/row_digests.py.
// hash_stripes: adds stripes of 16 words to the 16 lanes of a checksum, see runtime/checked_copy.h.
// restore_words: words from blocks of short exponents, see runtime/short_exponents.h.
// argmax: the largest logit's index, the lowest on ties; NaN never wins.
struct Kernels {
  const char* isa;
#define SHARDLINE_KERNEL(result, name, ...) result (*name)(__VA_ARGS__);
  SHARDLINE_FOR_EACH_KERNEL(SHARDLINE_KERNEL)
#undef SHARDLINE_KERNEL
};

// The table of the ISA in use.
const Kernels& kernels();

}  // namespace shardline
