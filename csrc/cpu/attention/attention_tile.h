// Query rows that pass over the splits together.
#pragma once

#include "attention/attention_amx.h"
#include "attention/attention_split.h"
#include "attention/tile_tasks.h"

namespace shardline::SHARDLINE_ISA {

// Row r of a sequence's rows for one KV head is token r / group, head r % group. The model computes in T, and the
// caches hold elements of type Stored.
template <class T, class Stored, bool kLatents>
class RowTile {
 public:
  // Rows that meet a split together. Latents are so wide that more rows should share them.
  static constexpr int kBlockRows = kLatents ? kMostBlockRows : kUsesAmx<T, Stored, kLatents> ? 32 : kMaxRows;
  // The most rows of a tile, which pass over a split together: they find it in L2, where their outputs stay, too.
  static constexpr int64_t kMostRows = kLatents ? kMostBlockRows : 480;

  RowTile(const AttentionArgs& args, const TileIndex& index)
      : args_(args),
        index_(index),
        group_(args.num_heads / args.num_kv_heads),
        first_token_(args.query_starts[index.sequence]) {}

  static int64_t output_width(const AttentionArgs& args) { return whole_vectors(args.value_dim); }

  // Takes the thread's scratch memory, with room for `extra` words, which it returns.
  int32_t* prepare(int64_t extra = 0) {
    const int64_t num_rows = index_.num_rows, row_words = kSplitKeys + output_width(args_);
    const size_t split_words = Split::scratch_words(args_) + JoinedValues::scratch_words(args_);
    // One more row than there are: queries over latents are joined there.
    const int64_t num_words = (num_rows + 1) * query_width(args_) + kBlockRows * row_words + extra;
    auto* memory =
        static_cast<int32_t*>(thread_scratch((static_cast<size_t>(num_words) + split_words) * sizeof(int32_t)));
    queries_ = memory;
    memory += (num_rows + 1) * query_width(args_);
    for (int r = 0; r < kBlockRows; ++r, memory += row_words) {
      rows_[r].scores = memory;
      rows_[r].partial.output = reinterpret_cast<float*>(memory + kSplitKeys);
    }
    split_.prepare(memory, args_);
    joined_.prepare(memory + Split::scratch_words(args_), args_);
    load_queries();
    return memory + split_words;
  }

  int64_t first_split() const { return visible(0).begin / kSplitKeys; }
  int64_t end_split() const { return end_split(index_.num_rows - 1); }
  int64_t end_split(int64_t r) const { return ceil_div(visible(r).end, kSplitKeys); }

  // The panels that this tile reads first in a split, one of its own.
  NextPanels first_panels(int64_t split) const {
    const int64_t begin = max64(split * kSplitKeys, visible(0).begin);
    const int64_t end = min64((split + 1) * kSplitKeys, visible(index_.num_rows - 1).end);
    return Split::first_panels(args_, index_.sequence, index_.kv_head, begin, end);
  }

  // Calls take(first_row, num_rows, rows) for the rows that see a part of the split, at most kBlockRows of them at a
  // time. Meanwhile it fetches the panels that are read next.
  template <class Take>
  void attend(int64_t split, const NextPanels& next, const Take& take) {
    const int64_t split_begin = split * kSplitKeys;
    int64_t begin = 0, end = index_.num_rows;
    while (begin < end && seen(begin, split_begin).empty()) ++begin;
    while (begin < end && seen(end - 1, split_begin).empty()) --end;
    const int64_t best_rows = fits_amx() ? kBlockRows : kBestRows;
    const int64_t num_blocks = end - begin <= kBlockRows ? 1 : ceil_div(end - begin, best_rows);
    const Range keys = {max64(0, visible(0).begin - split_begin),
                        min64(kSplitKeys, visible(index_.num_rows - 1).end - split_begin)};
    split_.find(args_, index_.sequence, index_.kv_head, split, keys, num_blocks == 1, next);
    joined_.clear();
    for (int64_t block = 0; block < num_blocks; ++block) {  // evenly, as in for_parts
      const int64_t first = begin + (end - begin) * block / num_blocks;
      const int num_rows = static_cast<int>(begin + (end - begin) * (block + 1) / num_blocks - first);
      for (int r = 0; r < num_rows; ++r) {
        rows_[r].query = queries_ + (first + r) * query_width(args_);
        rows_[r].keys = seen(first + r, split_begin);
      }
      attend_rows(num_rows);
      take(first, num_rows, rows_);
    }
  }

  // The row's place among the rows of the whole call, counted over tokens, then heads.
  int64_t place(int64_t r) const { return (first_token_ + token(r)) * args_.num_heads + head(r); }

  void store_output(int64_t r, const Partial& merged) const {
    T* out = static_cast<T*>(args_.out) + place(r) * args_.value_dim;
    store_mean(out, merged, args_.sinks == nullptr ? nullptr : args_.sinks + head(r), args_.value_dim);
  }

 private:
  using W = typename WordElement<T>::Type;
  using Split = KvSplit<W, Stored, kLatents>;

  // Whether tile registers take the model's heads.
  bool fits_amx() const {
    return kUsesAmx<T, Stored, kLatents> && args_.key_dim % kAmxDims == 0 && args_.value_dim % kAmxDims == 0;
  }
  void attend_rows(int num_rows) {
    if constexpr (kUsesAmx<T, Stored, kLatents>) {
      if (fits_amx()) return attend_split_in_tiles(rows_, num_rows, split_, joined_, args_);
    }
    attend_split<W>(rows_, num_rows, split_, args_);
  }

  static int64_t query_width(const AttentionArgs& args) { return whole_vectors(words_of<W>(args.key_dim)); }

  int64_t token(int64_t r) const { return (index_.first_row + r) / group_; }
  int64_t head(int64_t r) const { return index_.kv_head * group_ + (index_.first_row + r) % group_; }

  Range visible(int64_t r) const {
    const int64_t position = index_.first_position + token(r);
    if (args_.chunked) return {position / args_.window * args_.window, position + 1};
    return {args_.window > 0 ? max64(0, position - args_.window + 1) : 0, position + 1};
  }
  Range seen(int64_t r, int64_t split_begin) const {
    const Range range = visible(r);
    return {max64(0, range.begin - split_begin), min64(kSplitKeys, range.end - split_begin)};
  }

  // A row of the query. A token's row lies behind those of the token before: the hardware may not guess where.
  const T* query(int64_t r) const {
    const int64_t token_row = first_token_ + token(r);
    const T* query = static_cast<const T*>(args_.query) + token_row * args_.query_stride;
    if constexpr (!kLatents) {
      // The last token asks for a row that nobody uses.
      prefetch(query + args_.query_stride + head(r) * args_.key_dim, args_.key_dim);
      return query + head(r) * args_.key_dim;
    }
    const int64_t latent_dim = args_.value_dim;
    const T* rope = static_cast<const T*>(args_.query_rope) + token_row * args_.query_rope_stride;
    T* joined = reinterpret_cast<T*>(queries_ + index_.num_rows * query_width(args_));
    __builtin_memcpy(joined, query + head(r) * latent_dim, static_cast<size_t>(latent_dim) * sizeof(T));
    __builtin_memcpy(joined + latent_dim, rope + head(r) * args_.query_rope_head_stride,
                     static_cast<size_t>(args_.key_dim - latent_dim) * sizeof(T));
    return joined;
  }

  void load_queries() {
    for (int64_t r = 0; r < index_.num_rows; ++r) {
      const T* from = query(r);
      int32_t* to = queries_ + r * query_width(args_);
      for (int64_t d = 0; d < args_.key_dim; d += kLanes * kPerWord<W>) {
        store_words(to + d / kPerWord<W>, load_elements<W>(from + d, args_.key_dim - d));
      }
    }
  }

  const AttentionArgs& args_;
  const TileIndex index_;
  const int64_t group_, first_token_;
  int32_t* queries_ = nullptr;
  Row rows_[kBlockRows];
  Split split_;
  JoinedValues joined_;
};

// Partials that outlive the tile that computed them.
class PartialMemory {
 public:
  PartialMemory(int64_t count, int64_t value_width)
      : stride_(kHeader + value_width), memory_(new float[static_cast<size_t>(count * stride_)]) {}
  ~PartialMemory() { delete[] memory_; }
  PartialMemory(const PartialMemory&) = delete;

  static size_t num_bytes(int64_t count, int64_t value_width) {
    return static_cast<size_t>(count * (kHeader + value_width)) * sizeof(float);
  }

  void clear(int64_t place) { at(place)[2] = 0.0f; }
  bool has(int64_t place) const { return at(place)[2] != 0.0f; }
  void put(int64_t place, const Partial& partial) {
    float* to = at(place);
    to[0] = partial.max;
    to[1] = partial.sum;
    to[2] = 1.0f;
    __builtin_memcpy(to + kHeader, partial.output, static_cast<size_t>(stride_ - kHeader) * sizeof(float));
  }
  Partial get(int64_t place) const { return {at(place)[0], at(place)[1], at(place) + kHeader}; }

 private:
  static constexpr int64_t kHeader = 16;  // maximum, sum, whether there is a partial; padded to keep outputs aligned

  float* at(int64_t place) const { return memory_ + place * stride_; }

  const int64_t stride_;
  float* const memory_;
};

}  // namespace shardline::SHARDLINE_ISA
