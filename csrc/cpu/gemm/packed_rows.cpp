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

void packed_codes(const PackedCodesArgs& args) {
  constexpr int64_t kSmallRows = 4;
  const int64_t num_octets = (args.depth + kOctet - 1) / kOctet, bytes = octet_bytes(args.bits);
  parallel_for_if(args.num_rows > kSmallRows, args.num_rows, [&](int64_t row) {
    const int64_t panel = args.indices[row] / kPanelColumns, column = args.indices[row] % kPanelColumns;
    uint8_t* out = args.codes + row * args.depth;
    for (int64_t k = 0; k < args.depth; ++k) {
      const uint8_t* octet = args.panels + (panel * num_octets + k / kOctet) * bytes;
      out[k] = static_cast<uint8_t>(code_at(octet, args.bits, column, k % kOctet));
    }
  });
}

}  // namespace shardline
