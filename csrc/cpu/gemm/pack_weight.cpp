// Packs a weight [N, K] in the order in which linear() reads it. Elements move as 32-bit words (a pair of bf16, or a
// float) in square blocks, so that cache lines are read and written whole.
#include "dispatch/kernels.h"
#include "dispatch/variant.h"
#include "runtime/thread_pool.h"
#include "simd/transpose.h"
#include "simd/vec.h"

namespace shardline::SHARDLINE_ISA {
namespace {

// A panel's columns are far apart in the weight, and they are more streams than the hardware follows. So they are
// prefetched this far ahead.
constexpr int64_t kAheadBytes = 512;

// A block's source and destination.
struct Block {
  const char* rows;   // the first word of its first column
  int64_t row_bytes;  // from one column to the next
  int32_t* panel;     // one word of all columns, then the next word
};

// Packs kLanes words of kLanes columns; the weight has all of them.
inline void pack_whole(const Block& block) {
  I32 words[kLanes];
#pragma GCC unroll 16
  for (int c = 0; c < kLanes; ++c) {
    const char* row = block.rows + c * block.row_bytes;
    __builtin_prefetch(row + kAheadBytes);
    __builtin_memcpy(&words[c], row, sizeof words[c]);
  }
  transpose(words);
#pragma GCC unroll 16
  for (int w = 0; w < kLanes; ++w) __builtin_memcpy(block.panel + w * kPanelColumns, &words[w], sizeof words[w]);
}

// Packs num_words words of the columns [first, kLanes). The weight has `bytes` bytes of these words, and only the
// columns before `known`; zeros stand for the rest.
inline void pack_part(const Block& block, int64_t first, int64_t known, int64_t num_words, int64_t bytes) {
  for (int64_t c = first; c < kLanes; ++c) {
    int32_t words[kLanes] = {};
    if (c < known) {
      const size_t size = static_cast<size_t>(min64(bytes, int64_t{sizeof words}));
      __builtin_memcpy(words, block.rows + c * block.row_bytes, size);
    }
    for (int64_t w = 0; w < num_words; ++w) block.panel[w * kPanelColumns + c] = words[w];
  }
}

void pack_panel(const PackArgs& args, int64_t panel_index) {
  const int64_t element = args.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t depth_bytes = args.depth * element, row_bytes = args.weight_stride * element;
  const int64_t num_words = ceil_div(depth_bytes, 4), first_column = panel_index * args.place.width - args.place.first;
  int32_t* panel = static_cast<int32_t*>(args.panels) + panel_index * num_words * kPanelColumns + args.place.begin;
  for (int64_t word = 0; word < num_words; word += kLanes) {
    for (int64_t c = 0; c < args.place.width; c += kLanes) {
      const int64_t column = first_column + c, known = args.num_columns - column, bytes = depth_bytes - word * 4;
      if (column <= -kLanes) continue;  // belongs to another weight
      const char* rows = static_cast<const char*>(args.weight);
      if (args.num_columns > 0) rows += column * row_bytes + word * 4;  // a weight of no columns may be null
      const Block block = {rows, row_bytes, panel + word * kPanelColumns + c};
      if (column >= 0 && known >= kLanes && bytes >= kLanes * 4) {
        pack_whole(block);
      } else {
        pack_part(block, max64(0, -column), known, min64(kLanes, num_words - word), bytes);
      }
    }
  }
}

}  // namespace

void pack_weight(const PackArgs& args) {
  const int64_t first = args.place.first_panel();
  parallel_for(args.place.end_panel(args.num_columns) - first, [&](int64_t task) { pack_panel(args, first + task); });
}

}  // namespace shardline::SHARDLINE_ISA
