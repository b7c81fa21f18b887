// The absorbed products of MLA: a small GEMM for every head, each with its own weight. Every piece is a call of
// `linear`, whose bits do not depend on its shape. So every output is one chain of multiply-adds in the order of K.
#include "gemm/head_gemm.h"
#include "dispatch/kernels.h"
#include "runtime/thread_pool.h"

namespace shardline {

void linear_heads(const HeadLinearArgs& args) {
  constexpr int64_t kTaskTokens = 240, kSmallWork = 1 << 15;
  const int64_t size = static_cast<int64_t>(element_size(args.dtype));
  const int64_t num_panels = (args.num_columns + kPanelColumns - 1) / kPanelColumns;
  const int64_t padded_depth = args.dtype == DType::kBFloat16 ? (args.depth + 1) / 2 * 2 : args.depth;
  const int64_t num_blocks = (args.num_tokens + kTaskTokens - 1) / kTaskTokens;
  const bool parallel = args.num_tokens * args.num_heads * args.num_columns * args.depth > kSmallWork;
  parallel_for_if(parallel, args.num_heads * num_panels * num_blocks, [&](int64_t task) {
    const int64_t block = task % num_blocks, weight_panel = task / num_blocks;
    const int64_t head = weight_panel / num_panels, column = weight_panel % num_panels * kPanelColumns;
    const int64_t begin = args.num_tokens * block / num_blocks, end = args.num_tokens * (block + 1) / num_blocks;
    LinearArgs piece = {};
    piece.dtype = piece.out_dtype = args.dtype;
    piece.x = static_cast<const char*>(args.x) + (begin * args.x_stride + head * args.x_head_stride) * size;
    piece.x_stride = args.x_stride;
    piece.panels = static_cast<const char*>(args.panels) + weight_panel * padded_depth * kPanelColumns * size;
    piece.out = static_cast<char*>(args.out) + (begin * args.out_stride + head * args.out_head_stride + column) * size;
    piece.out_stride = args.out_stride;
    piece.num_rows = end - begin;
    piece.num_columns = args.num_columns - column < kPanelColumns ? args.num_columns - column : kPanelColumns;
    piece.depth = args.depth;
    kernels().linear(piece);
  });
}

}  // namespace shardline
