// Mixture of experts: which experts a token chooses, the products of all experts at once, and the sum over a token's
// slots.
//
// A slot is one expert chosen by one token. Its number is token * experts_per_token + position of the choice. Kernels
// work on slots sorted by expert, so that the rows of an expert lie together. The result of a slot does not depend on
// other slots.
#pragma once

#include <vector>

#include "dispatch/kernels.h"

namespace shardline {

struct RouteArgs {
  const float* logits;  // [num_tokens, num_experts], then the shared block's gate if there is one
  int64_t logits_stride;
  const float* bias;  // [num_experts] or null; added to the scores for the choice only
  int64_t num_tokens, num_experts, experts_per_token, num_groups, top_groups;
  bool sigmoid;   // else softmax
  bool top2_sum;  // a group's score is the sum of its two best scores; else its best score
  bool normalized;
  float scale;
  int32_t* ids;         // [num_tokens, experts_per_token], best first
  float* weights;       // the same
  float* shared_scale;  // [num_tokens] or null; the sigmoid of the logit after those of the experts
  int64_t* counts;      // [num_experts] or null; each grows by the expert's number of tokens
};

void route(const RouteArgs& args);

enum class WeightKind : uint8_t { kFloating, kInt8, kInt4, kGrouped };

// The same linear layer of several experts: panels as in gemm_args.h, one expert after another.
struct ExpertStack {
  WeightKind kind;
  const char* panels;
  const float* scales;  // [num_experts, columns padded to whole panels]; null for floating weights
  bool rotated;         // whether x is mixed before it becomes bytes, see rotate_row.h
  int64_t num_experts, num_panels, panel_bytes;
  GroupedLinearArgs grouped;  // of the first expert, for this kind: the weight without panels
  const int32_t* order;       // [num_experts, depth]: the column of x in each packed place; null: columns are in order
  bool rounds_x;              // to e4m3, for this kind; see RoundRowsArgs
  const float* input_scales;  // [num_experts]: the fixed scale of x; 0 for none
  float input_bound;
};

// The slots of the experts [first, first + count).
struct ExpertRange {
  const int32_t* ids;  // [num_tokens, experts_per_token]
  int64_t num_tokens, experts_per_token, first, count;
};

struct SortedSlots {
  std::vector<int64_t> begins;  // [count + 1]: where the rows of each expert begin
  std::vector<int32_t> places;  // [number of slots]: the row of each slot, -1 for slots of other experts
  std::vector<int32_t> tokens;  // [number of rows]
  int64_t num_tokens;           // tokens that have a row
  int64_t num_rows() const { return begins.back(); }
};

// What is added to products before they are rounded: a bias of each expert, or of each row, perhaps with a factor of
// its sum.
struct ExpertBias {
  const void* data;  // [num_experts, columns] of `dtype`; or [rows sorted by expert, columns] of floats; or null
  DType dtype;
  int64_t row_stride;  // 0: biases are of experts
  int64_t factors;     // with biases of rows: how far behind a bias its factor is; 0: there are none
  int64_t num_rows;    // that have a bias
};

// `compact`: tokens without a row are not counted, because x holds only the other tokens.
const SortedSlots& sort_slots(const ExpertRange& range, bool compact);

struct ExpertUpArgs {
  ExpertRange range;
  bool compact;
  DType dtype;
  const void* x;  // [num_tokens, depth]
  int64_t x_stride, depth, width;
  ExpertStack weight;  // [2 * width if gated else width, depth]
  ExpertBias bias;
  Activation activation;
  bool gated;
  void* out;  // [rows sorted by expert, width]
};

void expert_up(const ExpertUpArgs& args, const SortedSlots& slots);

struct ExpertDownArgs {
  DType dtype, out_dtype;
  const void* x;  // [rows sorted by expert, depth]
  int64_t depth, width;
  ExpertStack weight;  // [width, depth]
  ExpertBias bias;
};

// Returns [rows sorted by expert, width] of out_dtype, valid until the next call from the same thread.
const void* expert_down(const ExpertDownArgs& args, const SortedSlots& slots);

// Puts rows in the order of slots instead of experts.
void unsort_rows(const SortedSlots& slots, const void* rows, int64_t row_bytes, void* out);

// The bounds of the consecutive tokens that each rank owns, and of the consecutive experts that it has.
struct ExpertRanks {
  const int64_t* token_bounds;   // [num_ranks + 1]
  const int64_t* expert_bounds;  // [num_ranks + 1]
  int64_t num_ranks;
  int64_t rank_of(int32_t expert) const;
};

// Counts [from, to] the rows that ranks send each other: tokens to the ranks of their experts, and slots back.
void count_exchanged(const ExpertRanks& ranks, const int32_t* ids, int64_t experts_per_token, int64_t* row_counts,
                     int64_t* slot_counts);

// The places of the experts of slots. Expert e has the first copies[e] of its `width` places; consecutive tokens, from
// first_token on, take them in turn.
void place_slots(const int32_t* ids, int64_t num_tokens, int64_t experts_per_token, const int32_t* places,
                 int64_t width, const int32_t* copies, int64_t first_token, int32_t* out);

// Packs the rows of x [own tokens] that go to each rank, one rank after another; a token goes to a rank once.
void pack_dispatch(const ExpertRanks& ranks, const int32_t* ids, int64_t num_tokens, int64_t experts_per_token,
                   const char* x, int64_t x_stride_bytes, int64_t row_bytes, char* out);

// Where the slots of this rank's tokens lie, after every rank in turn has sent its part in the order of slots.
const std::vector<int32_t>& received_places(const ExpertRanks& ranks, const int32_t* ids, int64_t num_slots);

}  // namespace shardline
