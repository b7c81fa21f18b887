// Unpacks blocks of a panel of codes to the panels of a GEMM, for tiles of many rows.
#pragma once

#include "gemm/code_decoder.h"
#include "gemm/gemm_args.h"
#include "gemm/gemm_tiles.h"

namespace shardline::SHARDLINE_ISA {

// Bytes of an octet in a panel of a GEMM.
template <class T, int kParts>
constexpr int64_t kUnpackedBytes = kOctet * kPanelColumns * int64_t{sizeof(T)} * kParts;

// Unpacks a block of octets to the panels of a GEMM, one code after another: in fp32, or in bf16 with kParts rows for
// each pair of k.
template <class Element, int kParts>
class AnyUnpacker {
 public:
  using T = Element;
  static constexpr int kNumParts = kParts;
  static constexpr bool kDecodesFirstTile = false;

  explicit AnyUnpacker(const CodeTables& tables) : tables_(tables) {}

  void unpack(const GroupedLinearArgs& args, const Tile& tile) const {
    const auto* octet = reinterpret_cast<const uint8_t*>(tile.steps);
    char* to = tile.unpacked;
    for (int64_t o = tile.begin; o < tile.end; ++o) {
      const int64_t group = tile.panel * args.num_groups + o * kOctet / args.group_size;
      for (int64_t c = 0; c < kPanelColumns; ++c) {
        // The entry of the tables for a zero point is this many above the code.
        const int offset = args.zeros == nullptr ? 0 : zero_entry(args.bits) - args.zeros[group * kPanelColumns + c];
        for (int64_t k = 0; k < kOctet; ++k) write(code_at(octet, args.bits, c, k) + offset, c, k, to);
      }
      octet += octet_bytes(args.bits);
      to += kUnpackedBytes<T, kParts>;
    }
  }

 private:
  void write(int entry, int64_t c, int64_t k, char* to) const {
    if constexpr (sizeof(T) == 4) {
      reinterpret_cast<float*>(to)[k * kPanelColumns + c] = tables_.values[entry];
    } else {
      for (int part = 0; part < kParts; ++part) {
        reinterpret_cast<uint16_t*>(to)[((k / 2 * kParts + part) * kPanelColumns + c) * 2 + k % 2] =
            tables_.parts[part][entry];
      }
    }
  }

  const CodeTables& tables_;
};

#if defined(__AVX2__)

// The offsets of a vector of columns that a decoder takes.
template <class Decoder>
inline I32 load_offsets(const GroupedLinearArgs& args, int64_t group, int64_t column) {
  if constexpr (Decoder::kHasZeros) {
    typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
    Bytes zeros;
    __builtin_memcpy(&zeros, args.zeros + group * kPanelColumns + column, sizeof zeros);
    return Decoder::offsets(__builtin_convertvector(zeros, I32));
  } else {
    return I32{};
  }
}

// As AnyUnpacker, with the pairs of a decoder.
template <class Element, class Decoder>
class FastUnpacker {
 public:
  using T = Element;
  static constexpr int kNumParts = Decoder::kNumParts;
  static constexpr bool kDecodesFirstTile = sizeof(T) == 2;

  explicit FastUnpacker(const CodeTables& tables) : decoder_(tables) {}

  void unpack(const GroupedLinearArgs& args, const Tile& tile) const {
    const auto* octet = reinterpret_cast<const uint8_t*>(tile.steps);
    char* to = tile.unpacked;
    const int64_t group_octets = args.group_size / kOctet;
    for (int64_t begin = tile.begin, end; begin < tile.end; begin = end) {
      const int64_t g = begin / group_octets;
      end = min64(tile.end, (g + 1) * group_octets);
      I32 offsets[kVectors];
#pragma GCC unroll 8
      for (int64_t v = 0; v < kVectors; ++v) {
        offsets[v] = load_offsets<Decoder>(args, tile.panel * args.num_groups + g, v * kLanes);
      }
      for (int64_t o = begin; o < end; ++o) {
#pragma GCC unroll 8
        for (int64_t v = 0; v < kVectors; ++v) {
#pragma GCC unroll 2
          for (int step = 0; step < kOctet / 2; step += kSteps) {
            I32 pairs[kSteps * kNumParts];
            decoder_.decode(octet, v, offsets[v], step, pairs);
            write(pairs, step, to + v * kLanes * 4);
          }
        }
        octet += octet_bytes(Decoder::kBits);
        to += kUnpackedBytes<T, kNumParts>;
      }
    }
  }

  // Writes pairs of the steps from `first` on; `to` points to the first columns of an octet.
  static inline void write(const I32 (&pairs)[kSteps * kNumParts], int first, char* to) {
    constexpr int64_t kRow = kPanelColumns * 4;
    to += first * kNumParts * kRow * int64_t{sizeof(T)} / 2;
#pragma GCC unroll 8
    for (int i = 0; i < kSteps * kNumParts; ++i) {
      if constexpr (sizeof(T) == 4) {
        store(reinterpret_cast<float*>(to + 2 * i * kRow), even_of(pairs[i]));
        store(reinterpret_cast<float*>(to + (2 * i + 1) * kRow), odd_of(pairs[i]));
      } else {
        store(reinterpret_cast<int32_t*>(to + i * kRow), pairs[i]);
      }
    }
  }

  const Decoder& decoder() const { return decoder_; }

 private:
  static constexpr int64_t kVectors = kPanelColumns / kLanes;

  const Decoder decoder_;
};

#endif

}  // namespace shardline::SHARDLINE_ISA
