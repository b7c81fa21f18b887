// Packs the codes of a grouped weight into panels, and puts columns of x in the order of its groups; see gemm_args.h.
// Both only move bits. Blocks of whole panels are packed by pack_octets.cpp.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "dispatch/kernels.h"
#include "runtime/thread_pool.h"

namespace shardline {
namespace {

// Codes of the columns [0, kPanelColumns) of an octet, [column][k].
using Octet = uint8_t[kPanelColumns][kOctet];

void write_nibbles(Octet& codes, int64_t begin, int64_t end, uint8_t* out) {
  for (int64_t c = begin; c < end; ++c) {
    for (int parity = 0; parity < 2; ++parity) {
      const uint8_t* code = codes[c] + parity;
      uint8_t* half = out + c * 4 + parity * 2;
      half[0] = static_cast<uint8_t>(code[0] | code[2] << 4);
      half[1] = static_cast<uint8_t>(code[4] | code[6] << 4);
    }
  }
}

void write_bytes(Octet& codes, int64_t begin, int64_t end, uint8_t* out) {
  for (int64_t c = begin; c < end; ++c) {
    for (int64_t k = 0; k < kOctet; ++k) {
      out[k / 4 * 256 + c / 4 * 16 + k / 2 % 2 * 8 + c % 4 * 2 + k % 2] = codes[c][k];
    }
  }
}

void write_six_bits(Octet& codes, int64_t begin, int64_t end, uint8_t* out) {
  // The column before an odd one shares its bytes and belongs to the weight before.
  for (int64_t k = 0; begin % 2 != 0 && k < kOctet; ++k) {
    codes[begin - 1][k] = static_cast<uint8_t>(code_at(out, 6, begin - 1, k));
  }
  for (int64_t c = begin / 2 * 2; c < end; c += 2) {
    uint64_t first, second;
    std::memcpy(&first, codes[c], sizeof first);
    std::memcpy(&second, codes[c + 1], sizeof second);
    write_six_bit_pair(first, second, c, out);
  }
}

template <class Element>
void gather_elements(const GatherColumnsArgs& args) {
  constexpr int64_t kSmallRows = 4;
  parallel_for_if(args.num_rows > kSmallRows, args.num_rows, [&](int64_t row) {
    const Element* from = static_cast<const Element*>(args.x) + row * args.x_stride;
    Element* out = static_cast<Element*>(args.out) + row * args.num_columns;
    for (int64_t i = 0; i < args.num_columns; ++i) out[i] = from[args.order[i]];
  });
}

}  // namespace

const float* e4m3_table() {
  static const std::vector<float> table = [] {
    std::vector<float> values(256);
    for (int code = 0; code < 256; ++code) {
      const int exponent = code >> 3 & 15, mantissa = code & 7;
      const float magnitude = (code & 127) == 127 ? NAN
                              : exponent == 0     ? std::ldexp(static_cast<float>(mantissa), -9)
                                                  : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
      values[static_cast<size_t>(code)] = std::copysign(magnitude, code < 128 ? 1.0f : -1.0f);
    }
    return values;
  }();
  return table.data();
}

void gather_columns(const GatherColumnsArgs& args) {
  switch (args.element_bytes) {
    case 1: return gather_elements<uint8_t>(args);
    case 2: return gather_elements<uint16_t>(args);
    default: return gather_elements<uint32_t>(args);
  }
}

void pack_codes_panel(const PackCodesArgs& args, int64_t panel_index) {
  const int64_t num_octets = (args.depth + kOctet - 1) / kOctet, bytes = octet_bytes(args.bits);
  const int64_t first_column = panel_index * args.place.width - args.place.first;
  // Columns before `begin` belong to another weight, those behind this weight's become zero.
  const int64_t begin = std::max<int64_t>(0, -first_column), end = args.place.width;
  const int64_t known = std::min(end, args.num_columns - first_column);
  const int64_t packed = begin == 0 && known == end ? kernels().pack_octets(args, panel_index) : 0;
  uint8_t* out = args.panels + (panel_index * num_octets + packed) * bytes;
  const auto write = args.bits == 4 ? write_nibbles : args.bits == 6 ? write_six_bits : write_bytes;
  for (int64_t o = packed; o < num_octets; ++o, out += bytes) {
    Octet codes = {};
    const int64_t count = std::min(kOctet, args.depth - o * kOctet);
    for (int64_t c = begin; c < known; ++c) {
      const uint8_t* from = args.codes + (first_column + c) * args.codes_stride + o * kOctet;
      std::copy(from, from + count, codes[args.place.begin + c]);
    }
    write(codes, args.place.begin + begin, args.place.begin + end, out);
  }
}

void pack_codes(const PackCodesArgs& args) {
  const int64_t first = args.place.first_panel();
  parallel_for(args.place.end_panel(args.num_columns) - first,
               [&](int64_t task) { pack_codes_panel(args, first + task); });
}

}  // namespace shardline
