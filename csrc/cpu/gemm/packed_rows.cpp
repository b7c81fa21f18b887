#include <cstring>

#include "dispatch/kernels.h"
#include "gemm/packed_rows.h"
#include "runtime/thread_pool.h"

namespace shardline {

void packed_rows(const PackedRowsArgs& args) {
  constexpr int64_t kSmallRows = 4;
  parallel_for_if(args.num_rows > kSmallRows, args.num_rows, [&](int64_t row) {
    const int64_t panel = args.indices[row] / kPanelColumns, column = args.indices[row] % kPanelColumns;
    const char* step = static_cast<const char*>(args.panels) + (panel * args.num_steps * kPanelColumns + column) * 4;
    char* out = static_cast<char*>(args.out) + row * args.row_bytes;
    const int64_t whole = args.row_bytes / 4;
    for (int64_t s = 0; s < whole; ++s, step += kPanelColumns * 4) std::memcpy(out + s * 4, step, 4);
    if (args.row_bytes % 4 != 0) std::memcpy(out + whole * 4, step, 2);
  });
}

}  // namespace shardline
