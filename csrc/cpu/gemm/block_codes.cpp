// Unpacks the blocks of GGUF: the codes of weights, and the small scales of groups; see gemm_args.h.
#include "dispatch/kernels.h"
#include "dispatch/variant.h"
#include "runtime/thread_pool.h"

namespace shardline::SHARDLINE_ISA {
namespace {

// Fixed trip counts, so that the compiler makes vectors of these loops.
template <int kBytes>
inline void split_nibbles(const uint8_t* packed, uint8_t* codes) {
  for (int j = 0; j < kBytes; ++j) codes[j] = packed[j] & 15;
  for (int j = 0; j < kBytes; ++j) codes[kBytes + j] = packed[j] >> 4;
}

// Adds bit `bit` and its neighbours in `mask`, moved to bit 4.
template <int kCount>
inline void add_high_bits(const uint8_t* packed, int bit, int mask, uint8_t* codes) {
  for (int j = 0; j < kCount; ++j) codes[j] = static_cast<uint8_t>(codes[j] | (packed[j] >> bit & mask) << 4);
}

// Bit j of 32 belongs to code j.
inline void add_fifth_bits(const uint8_t* packed, uint8_t* codes) {
  uint32_t bits;
  __builtin_memcpy(&bits, packed, sizeof bits);
  for (int j = 0; j < 32; ++j) codes[j] = static_cast<uint8_t>(codes[j] | (bits >> j & 1) << 4);
}

// Six bits each, in 12 bytes: the scales and mins of 8 groups.
inline void unpack_scales(const uint8_t* packed, uint8_t* scales, uint8_t* mins) {
  for (int i = 0; i < 4; ++i) {
    const uint8_t low = packed[i], middle = packed[4 + i], high = packed[8 + i];
    scales[i] = low & 63;
    mins[i] = middle & 63;
    scales[4 + i] = static_cast<uint8_t>((high & 15) | low >> 6 << 4);
    mins[4 + i] = static_cast<uint8_t>(high >> 4 | middle >> 6 << 4);
  }
}

struct Outputs {
  uint8_t *codes, *scales, *mins;
};

inline void unpack_block(BlockKind kind, const uint8_t* block, const Outputs& out) {
  switch (kind) {
    case BlockKind::kQ4_0: return split_nibbles<16>(block + 2, out.codes);
    case BlockKind::kQ4_1: return split_nibbles<16>(block + 4, out.codes);
    case BlockKind::kQ5_0: split_nibbles<16>(block + 6, out.codes); return add_fifth_bits(block + 2, out.codes);
    case BlockKind::kQ5_1: split_nibbles<16>(block + 8, out.codes); return add_fifth_bits(block + 4, out.codes);
    case BlockKind::kQ8_0:
      for (int j = 0; j < 32; ++j) out.codes[j] = block[2 + j] ^ 128;
      return;
    case BlockKind::kMXFP4: return split_nibbles<16>(block + 1, out.codes);
    case BlockKind::kQ4_K:
      unpack_scales(block + 4, out.scales, out.mins);
      for (int i = 0; i < 4; ++i) split_nibbles<32>(block + 16 + i * 32, out.codes + i * 64);
      return;
    case BlockKind::kQ5_K:
      unpack_scales(block + 4, out.scales, out.mins);
      for (int i = 0; i < 4; ++i) split_nibbles<32>(block + 48 + i * 32, out.codes + i * 64);
      for (int i = 0; i < 8; ++i) add_high_bits<32>(block + 16, i, 1, out.codes + i * 32);
      return;
    case BlockKind::kQ6_K:
      __builtin_memcpy(out.scales, block + 192, 16);
      for (int i = 0; i < 2; ++i) split_nibbles<64>(block + i * 64, out.codes + i * 128);
      for (int i = 0; i < 8; ++i) {
        add_high_bits<32>(block + 128 + i / 4 * 32, i % 4 * 2, 3, out.codes + i * 32);
      }
      return;
  }
}

}  // namespace

void unpack_blocks(const UnpackBlocksArgs& args) {
  const BlockShape shape = block_shape(args.kind);
  parallel_for(args.num_rows, [&](int64_t row) {
    const uint8_t* block = args.blocks + row * args.row_stride;
    uint8_t* codes = args.codes + row * args.codes_stride;
    for (int64_t b = 0; b < args.row_blocks; ++b, block += shape.bytes, codes += shape.elements) {
      const int64_t groups = (row * args.row_blocks + b) * shape.num_scales;
      unpack_block(args.kind, block, {codes, args.scales + groups, args.mins + groups});
    }
  });
}

}  // namespace shardline::SHARDLINE_ISA
