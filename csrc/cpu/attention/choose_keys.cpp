#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>

#include "attention/choose_keys_args.h"
#include "dispatch/kernels.h"
#include "runtime/thread_pool.h"

namespace shardline {
namespace {

constexpr int64_t kPanelTokens = 16;
constexpr int64_t kMostScores = 4 << 20;  // of a call: prompts have many rows

void choose_row(const ScoreKeysArgs& rows, int64_t row, int64_t* slots, int64_t top_k) {
  float* scores = rows.scores + row * rows.scores_stride;
  const int64_t count = rows.contexts[row];
  for (int64_t i = 0; i < count; ++i) {
    if (!(scores[i] == scores[i])) scores[i] = -std::numeric_limits<float>::infinity();
  }
  int32_t* order = static_cast<int32_t*>(thread_scratch(sizeof(int32_t) * count));
  std::iota(order, order + count, 0);
  std::nth_element(order, order + top_k - 1, order + count,
                   [scores](int32_t a, int32_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
  std::sort(order, order + top_k);
  const int32_t* blocks = rows.block_tables + rows.sequences[row] * rows.table_stride;
  for (int64_t i = 0; i < top_k; ++i) {
    slots[i] = blocks[order[i] / rows.block_size] * rows.block_size + order[i] % rows.block_size;
  }
}

// The 16 tokens of a page of `out`: its lines are written whole.
template <class Word>
void take_page(const TakeTokensArgs& args, int64_t page) {
  const Word* tokens[kPanelTokens];
  for (int64_t lane = 0; lane < kPanelTokens; ++lane) {
    const int64_t slot = args.slots[page * kPanelTokens + lane];
    const int64_t panel = slot / kPanelTokens * args.num_words * kPanelTokens;
    tokens[lane] = static_cast<const Word*>(args.pages) + panel + slot % kPanelTokens;
  }
  Word* out = static_cast<Word*>(args.out) + page * args.num_words * kPanelTokens;
  for (int64_t word = 0; word < args.num_words; ++word) {
    for (int64_t lane = 0; lane < kPanelTokens; ++lane) {
      out[word * kPanelTokens + lane] = tokens[lane][word * kPanelTokens];
    }
  }
}

}  // namespace

void take_tokens(const TakeTokensArgs& args) {
  parallel_for(args.num_slots / kPanelTokens, [&](int64_t page) {
    if (args.word_bytes == 4) return take_page<uint32_t>(args, page);
    if (args.word_bytes == 2) return take_page<uint16_t>(args, page);
    take_page<uint8_t>(args, page);
  });
}

void choose_keys(const ChooseKeysArgs& args) {
  const int64_t each = std::max<int64_t>(1, kMostScores / std::max<int64_t>(1, args.rows.most_keys));
  const std::unique_ptr<float[]> scores(new float[std::min(each, args.rows.num_rows) * args.rows.most_keys]);
  const int64_t row_bytes = args.rows.query_stride * (args.rows.dtype == DType::kFloat32 ? 4 : 2);
  for (int64_t first = 0; first < args.rows.num_rows; first += each) {
    ScoreKeysArgs rows = args.rows;
    rows.query = static_cast<const char*>(rows.query) + first * row_bytes;
    rows.weights += first * rows.weights_stride;
    rows.sequences += first;
    rows.contexts += first;
    rows.scores = scores.get();
    rows.scores_stride = rows.most_keys;
    rows.num_rows = std::min(each, args.rows.num_rows - first);
    kernels().score_keys(rows);
    parallel_for(rows.num_rows,
                 [&](int64_t row) { choose_row(rows, row, args.slots + (first + row) * args.top_k, args.top_k); });
  }
}

}  // namespace shardline
