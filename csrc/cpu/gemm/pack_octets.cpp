// Packs the codes of whole panels of a grouped weight; see gemm_args.h. A word is what one column contributes to an
// octet of 4-bit codes, or to half an octet of 8-bit codes. These words move in square blocks, so that cache lines are
// read and written whole.
#include "dispatch/kernels.h"
#include "dispatch/variant.h"
#include "simd/transpose.h"
#include "simd/vec.h"

namespace shardline::SHARDLINE_ISA {
namespace {

typedef uint64_t U64 __attribute__((vector_size(kLanes * 4)));

// A panel's columns are more streams than the hardware follows, so they are prefetched this far ahead.
constexpr int64_t kAheadBytes = 512;

template <int... kLane>
inline I32 even_words(U64 a, U64 b, Lanes<kLane...>) {
  return __builtin_shufflevector((I32)a, (I32)b, (2 * kLane)...);
}

// Eight codes below 16 in each element become one word, in the lower half of the element.
inline U64 join_nibbles(U64 codes) {
  const U64 joined = codes | codes >> 12;  // codes 0 and 2, 1 and 3, then 4 and 6, 5 and 7
  return (joined & 0xff) | (joined >> 24 & 0xff00) | (joined << 8 & 0xff0000) | (joined >> 16 & 0xff000000);
}

inline I32 load_nibbles(const uint8_t* codes) {
  U64 first, second;
  __builtin_memcpy(&first, codes, sizeof first);
  __builtin_memcpy(&second, codes + sizeof first, sizeof second);
  return even_words(join_nibbles(first), join_nibbles(second), AllLanes{});
}

// In each four columns, the first pairs of codes of all four, then their second pairs.
template <int... kLane>
inline I32 group_pairs(I32 words, Lanes<kLane...>) {
  const U64 v = (U64)words;
  const I32 t = (I32)((v & 0xffff00000000ffff) | (v >> 16 & 0xffff0000) | (v << 16 & 0xffff00000000));
  return __builtin_shufflevector(t, t, (kLane / 4 * 4 + kLane % 2 * 2 + kLane % 4 / 2)...);
}

// Packs kLanes words of kLanes columns.
template <int kBits>
inline void pack_block(const uint8_t* codes, int64_t stride, int32_t* panel) {
  I32 words[kLanes];
#pragma GCC unroll 16
  for (int c = 0; c < kLanes; ++c) {
    const uint8_t* column = codes + c * stride;
    __builtin_prefetch(column + kAheadBytes);
    if constexpr (kBits == 4) {
      words[c] = load_nibbles(column);
    } else {
      __builtin_memcpy(&words[c], column, sizeof words[c]);
    }
  }
  transpose(words);
#pragma GCC unroll 16
  for (int w = 0; w < kLanes; ++w) {
    const I32 row = kBits == 4 ? words[w] : group_pairs(words[w], AllLanes{});
    __builtin_memcpy(panel + w * kPanelColumns, &row, sizeof row);
  }
}

template <int kBits>
int64_t pack_words(const PackCodesArgs& args, int64_t panel_index) {
  constexpr int64_t kBlock = kLanes * 32 / kBits;  // codes of a column; always whole octets
  const uint8_t* codes = args.codes + (panel_index * args.place.width - args.place.first) * args.codes_stride;
  const int64_t words = ceil_div(args.depth, kOctet) * kBits / 4;
  int32_t* panel = reinterpret_cast<int32_t*>(args.panels) + panel_index * words * kPanelColumns + args.place.begin;
  const int64_t end = args.depth / kBlock * kBlock;
  for (int64_t k = 0; k < end; k += kBlock, panel += kLanes * kPanelColumns) {
    for (int64_t c = 0; c < args.place.width; c += kLanes) {
      pack_block<kBits>(codes + c * args.codes_stride + k, args.codes_stride, panel + c);
    }
  }
  return end / kOctet;
}

int64_t pack_six_bits(const PackCodesArgs& args, int64_t panel_index) {
  const int64_t end = args.depth / kOctet;
  const uint8_t* codes = args.codes + (panel_index * args.place.width - args.place.first) * args.codes_stride;
  uint8_t* octet = args.panels + panel_index * ceil_div(args.depth, kOctet) * octet_bytes(6);
  for (int64_t o = 0; o < end; ++o, codes += kOctet, octet += octet_bytes(6)) {
    for (int64_t c = 0; c < args.place.width; c += 2) {
      uint64_t first, second;
      __builtin_memcpy(&first, codes + c * args.codes_stride, sizeof first);
      __builtin_memcpy(&second, codes + (c + 1) * args.codes_stride, sizeof second);
      write_six_bit_pair(first, second, args.place.begin + c, octet);
    }
  }
  return end;
}

}  // namespace

int64_t pack_octets(const PackCodesArgs& args, int64_t panel_index) {
  if (args.bits == 6) return pack_six_bits(args, panel_index);
  return args.bits == 4 ? pack_words<4>(args, panel_index) : pack_words<8>(args, panel_index);
}

}  // namespace shardline::SHARDLINE_ISA
