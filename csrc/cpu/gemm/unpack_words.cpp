// Unpacks numbers that a file holds in words; see gemm_args.h. It only moves bits.
#include <algorithm>
#include <cstring>

#include "dispatch/kernels.h"
#include "runtime/thread_pool.h"

namespace shardline {
namespace {

constexpr int64_t kBytes = 8;             // of a register of numbers
constexpr int64_t kLineBytes = 64;        // of a cache line: words beside each other are read together
constexpr int64_t kTileWords = 32;        // that a tile reads of each line
constexpr int64_t kTaskWords = 1 << 13;   // of each line, in tasks whose lines are rows of the output

struct Range {
  int64_t begin, end;
};

int64_t ceil_div(int64_t count, int64_t unit) { return (count + unit - 1) / unit; }

constexpr uint64_t kLowBits = 0x7f7f7f7f7f7f7f7full;

// The numbers of a word as bytes, those of the lowest bits first.
uint64_t spread(const UnpackWordsArgs& args, const uint8_t* word) {
  uint32_t bits = 0;
  std::memcpy(&bits, word, static_cast<size_t>(args.word_bytes));
  if (args.bits == 8) return bits;
  uint64_t x = bits;
  x = (x | x << 16) & 0x0000ffff0000ffffull;
  x = (x | x << 8) & 0x00ff00ff00ff00ffull;
  return (x | x << 4) & 0x0f0f0f0f0f0f0f0full;
}

// Adds bytes to bytes, each of which wraps.
uint64_t add_bytes(uint64_t a, uint64_t b) { return ((a & kLowBits) + (b & kLowBits)) ^ ((a ^ b) & ~kLowBits); }

// Eight rows of eight bytes become columns: blocks of 1, 2 and 4 swap places.
void transpose_bytes(uint64_t rows[kBytes]) {
  constexpr uint64_t kMasks[] = {0x00ff00ff00ff00ffull, 0x0000ffff0000ffffull, 0x00000000ffffffffull};
  for (int stage = 0; stage < 3; ++stage) {
    const int distance = 1 << stage, shift = 8 * distance;
    for (int i = 0; i < kBytes; ++i) {
      if ((i & distance) != 0) continue;
      uint64_t& low = rows[i];
      uint64_t& high = rows[i + distance];
      const uint64_t moved = (low >> shift ^ high) & kMasks[stage];
      high ^= moved;
      low ^= moved << shift;
    }
  }
}

struct Unpacker {
  const UnpackWordsArgs& args;
  const int64_t in_word = args.word_bytes * 8 / args.bits;
  const uint64_t offset = 0x0101010101010101ull * args.offset;

  const uint8_t* word(int64_t w, int64_t line) const {
    return args.words + w * args.word_stride + line * args.line_stride;
  }
  uint64_t numbers(int64_t w, int64_t line) const { return add_bytes(spread(args, word(w, line)), offset); }

  // The numbers of a word are neighbours in a row of the output. `kInOrder`: the lowest bits are the first of them.
  template <int kInWord, bool kInOrder>
  void fill_rows(Range words, Range rows) const {
    for (int64_t first = words.begin; first < words.end; first += kTileWords) {
      const int64_t last = std::min(first + kTileWords, words.end);
      for (int64_t w = first; w < last; ++w) {
        for (int64_t row = rows.begin; row < rows.end; ++row) {
          const uint64_t own = numbers(w, row);
          uint8_t* to = args.codes + row * args.codes_stride + w * kInWord;
          if constexpr (kInOrder) {
            std::memcpy(to, &own, kInWord);
          } else {
            for (int i = 0; i < kInWord; ++i) to[args.order[i]] = static_cast<uint8_t>(own >> 8 * i);
          }
        }
      }
    }
  }

  template <bool kInOrder>
  void fill_rows(Range words, Range rows) const {
    switch (in_word) {
      case 1: return fill_rows<1, kInOrder>(words, rows);
      case 2: return fill_rows<2, kInOrder>(words, rows);
      case 4: return fill_rows<4, kInOrder>(words, rows);
      default: return fill_rows<8, kInOrder>(words, rows);
    }
  }

  // The numbers of a word are neighbours in a column of the output, whose columns are the lines.
  void fill_columns(Range words) const {
    for (int64_t line = 0; line < args.num_lines; line += kBytes) {
      const int64_t count = std::min(kBytes, args.num_lines - line);
      for (int64_t w = words.begin; w < words.end; ++w) {
        uint64_t rows[kBytes] = {};
        for (int64_t i = 0; i < count; ++i) rows[i] = numbers(w, line + i);
        transpose_bytes(rows);
        for (int64_t i = 0; i < in_word; ++i) {
          uint8_t* to = args.codes + (w * in_word + args.order[i]) * args.codes_stride + line;
          std::memcpy(to, &rows[i], static_cast<size_t>(count));
        }
      }
    }
  }
};

// Bytes that lie in order in rows become words of four.
UnpackWordsArgs in_long_words(UnpackWordsArgs args) {
  if (args.word_bytes != 1 || args.bits != 4 || args.along_rows || args.word_stride != 1 || args.num_words % 4 != 0) {
    return args;
  }
  for (int64_t i = 2; i < 8; ++i) args.order[i] = args.order[i % 2] + i / 2 * 2;
  args.word_bytes = args.word_stride = 4;
  args.num_words /= 4;
  return args;
}

}  // namespace

void unpack_words(const UnpackWordsArgs& stored) {
  const UnpackWordsArgs args = in_long_words(stored);
  const Unpacker unpacker = {args};
  const int64_t step = kLineBytes / args.word_bytes;
  if (args.along_rows) {
    parallel_for(ceil_div(args.num_words, step), [&](int64_t task) {
      unpacker.fill_columns({task * step, std::min((task + 1) * step, args.num_words)});
    });
    return;
  }
  bool in_order = true;
  for (int64_t i = 0; i < unpacker.in_word; ++i) in_order = in_order && args.order[i] == i;
  const int64_t parts = ceil_div(args.num_words, kTaskWords);
  parallel_for(parts * ceil_div(args.num_lines, step), [&](int64_t task) {
    const int64_t line = task / parts * step, word = task % parts * kTaskWords;
    const Range words = {word, std::min(word + kTaskWords, args.num_words)};
    const Range rows = {line, std::min(line + step, args.num_lines)};
    in_order ? unpacker.fill_rows<true>(words, rows) : unpacker.fill_rows<false>(words, rows);
  });
}

}  // namespace shardline
