// Unpacks numbers that a file holds in words; see gemm_args.h. It only moves bits.
#include <algorithm>
#include <cstring>

#include "dispatch/kernels.h"
#include "runtime/thread_pool.h"

namespace shardline {
namespace {

constexpr int64_t kBytes = 8;            // of a register of numbers
constexpr int64_t kLineBytes = 64;       // of a cache line: words beside each other are read together
constexpr int64_t kAhead = 16;           // lines or words of a line that are fetched ahead of those that are unpacked
constexpr int64_t kTileWords = 32;       // that a tile reads of each line
constexpr int64_t kTaskWords = 1 << 13;  // of each line, in tasks whose lines are rows of the output
constexpr uint64_t kLowBits = 0x7f7f7f7f7f7f7f7full;

struct Range {
  int64_t begin, end;
};

int64_t ceil_div(int64_t count, int64_t unit) { return (count + unit - 1) / unit; }

// Adds bytes to bytes, each of which wraps.
uint64_t add_bytes(uint64_t a, uint64_t b) { return ((a & kLowBits) + (b & kLowBits)) ^ ((a ^ b) & ~kLowBits); }

// Eight rows of eight bytes become columns: blocks of 1, 2 and 4 swap places.
void transpose_bytes(uint64_t (&rows)[kBytes]) {
  constexpr uint64_t kMasks[] = {0x00ff00ff00ff00ffull, 0x0000ffff0000ffffull, 0x00000000ffffffffull};
  for (int stage = 0; stage < 3; ++stage) {
    const int distance = 1 << stage, shift = 8 * distance;
    for (int i = 0; i < kBytes; ++i) {
      if ((i & distance) != 0) continue;
      const uint64_t moved = (rows[i] >> shift ^ rows[i + distance]) & kMasks[stage];
      rows[i + distance] ^= moved;
      rows[i] ^= moved << shift;
    }
  }
}

template <int kWordBytes, int kBits>
struct Unpacker {
  static constexpr int kInWord = kWordBytes * 8 / kBits;

  const UnpackWordsArgs& args;
  const uint64_t offset = 0x0101010101010101ull * args.offset;

  const uint8_t* word(int64_t w, int64_t line) const {
    return args.words + w * args.word_stride + line * args.line_stride;
  }
  void fetch(int64_t w, int64_t line) const { __builtin_prefetch(word(w, line)); }
  // The numbers of a word as bytes, those of the lowest bits first.
  uint64_t numbers(int64_t w, int64_t line) const {
    uint32_t bits = 0;
    std::memcpy(&bits, word(w, line), kWordBytes);
    uint64_t x = bits;
    if constexpr (kBits == 4) {
      x = (x | x << 16) & 0x0000ffff0000ffffull;
      x = (x | x << 8) & 0x00ff00ff00ff00ffull;
      x = (x | x << 4) & 0x0f0f0f0f0f0f0f0full;
    }
    return add_bytes(x, offset);
  }

  // The numbers of a word are neighbours in a row of the output. `kInOrder`: the lowest bits are the first of them.
  template <bool kInOrder>
  void fill_rows(Range words, Range rows) const {
    for (int64_t first = words.begin; first < words.end; first += kTileWords) {
      const int64_t last = std::min(first + kTileWords, words.end);
      for (int64_t w = first; w < last; ++w) {
        fetch(w + kAhead, rows.begin);
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

  // The numbers of a word are neighbours in a column of the output, whose columns are the lines.
  template <bool kAllBytes>
  void fill_columns(Range words, int64_t line, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) fetch(words.begin, line + i + kAhead);
    for (int64_t w = words.begin; w < words.end; ++w) {
      uint64_t rows[kBytes] = {};
      for (int64_t i = 0; i < (kAllBytes ? kBytes : count); ++i) rows[i] = numbers(w, line + i);
      transpose_bytes(rows);
      for (int i = 0; i < kInWord; ++i) {
        uint8_t* to = args.codes + (w * kInWord + args.order[i]) * args.codes_stride + line;
        std::memcpy(to, &rows[i], static_cast<size_t>(kAllBytes ? kBytes : count));
      }
    }
  }
  void fill_columns(Range words) const {
    const int64_t end = args.num_lines / kBytes * kBytes;
    for (int64_t line = 0; line < end; line += kBytes) fill_columns<true>(words, line, kBytes);
    if (end < args.num_lines) fill_columns<false>(words, end, args.num_lines - end);
  }

  void unpack() const {
    constexpr int64_t kStep = kLineBytes / kWordBytes;
    if (args.along_rows) {
      parallel_for(ceil_div(args.num_words, kStep),
                   [&](int64_t task) { fill_columns({task * kStep, std::min((task + 1) * kStep, args.num_words)}); });
      return;
    }
    bool in_order = true;
    for (int64_t i = 0; i < kInWord; ++i) in_order = in_order && args.order[i] == i;
    const int64_t parts = ceil_div(args.num_words, kTaskWords);
    parallel_for(parts * ceil_div(args.num_lines, kStep), [&](int64_t task) {
      const int64_t line = task / parts * kStep, word = task % parts * kTaskWords;
      const Range words = {word, std::min(word + kTaskWords, args.num_words)};
      const Range rows = {line, std::min(line + kStep, args.num_lines)};
      in_order ? fill_rows<true>(words, rows) : fill_rows<false>(words, rows);
    });
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
  if (args.word_bytes == 4) {
    args.bits == 4 ? Unpacker<4, 4>{args}.unpack() : Unpacker<4, 8>{args}.unpack();
  } else {
    args.bits == 4 ? Unpacker<1, 4>{args}.unpack() : Unpacker<1, 8>{args}.unpack();
  }
}

}  // namespace shardline
