// What adapters add to the outputs of a linear, in fp32, see low_rank_args.h. Rows are grouped by adapter, so that its
// weights are read once for a few rows. Every number of a row is summed in an order that depends on nothing else: those
// of x down^T in kChains chains over K, which are added in order, and those of the product with `up` in one chain over
// the rank.
#include "dispatch/variant.h"
#include "gemm/gemm_chain.h"
#include "runtime/thread_pool.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int64_t kSmallWork = 1 << 15;
constexpr int64_t kChunkColumns = 512;
constexpr int kBlockVectors = kRankBlock / kLanes;
// AVX-512 has 32 registers, other ISAs have 16.
constexpr int kChains = kLanes == 16 ? 4 : 2, kMostRows = kLanes == 16 ? 4 : 2;
constexpr int kColumnVectors = kLanes == 16 ? 4 : 3;
// With so many groups for each thread, a thread computes all of a group, so that it reads the adapter in one stream.
constexpr int64_t kGroupsPerThread = 4;
constexpr int64_t kCacheLine = 64;
constexpr int kToL2 = 2;

// Memory that will be read soon, a few lines for each step until then.
struct Ahead {
  const char *next, *end;
  int64_t lines_per_step;

  inline void request() {
    for (int64_t line = 0; line < lines_per_step && next < end; ++line, next += kCacheLine) {
      __builtin_prefetch(next, 0, kToL2);
    }
  }
};

// Some rows of one adapter.
struct RowGroup {
  int32_t slot, count;
  int32_t rows[kAdapterRows];
};

struct Groups {
  const RowGroup* groups;
  int64_t count;
};

// Groups rows by adapter, in the order of their first rows; then those without one.
Groups group_rows(const LowRankArgs& args) {
  int32_t *first = args.order, *next = first + args.num_slots;
  RowGroup* groups = reinterpret_cast<RowGroup*>(next + args.num_rows);
  for (int64_t slot = 0; slot < args.num_slots; ++slot) first[slot] = -1;
  int32_t first_without = -1;
  for (int64_t row = args.num_rows - 1; row >= 0; --row) {
    int32_t& head = args.slots[row] < 0 ? first_without : first[args.slots[row]];
    next[row] = head;
    head = static_cast<int32_t>(row);
  }
  int64_t count = 0;
  const auto add_groups = [&](int32_t row, int32_t slot) {
    while (row >= 0) {
      RowGroup& group = groups[count++];
      group.slot = slot;
      for (group.count = 0; row >= 0 && group.count < kAdapterRows; row = next[row]) group.rows[group.count++] = row;
    }
  };
  for (int32_t row = 0; row < args.num_rows; ++row) {
    if (args.slots[row] >= 0 && first[args.slots[row]] == row) add_groups(row, args.slots[row]);
  }
  add_groups(first_without, -1);
  return {groups, count};
}

template <int kRows>
inline void add_step(const float* const (&x)[kRows], const float* down, int64_t step, bool,
                     F32 (&sum)[kRows][kBlockVectors]) {
  F32 weight[kBlockVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kBlockVectors; ++v) weight[v] = load(down + step * kRankBlock + v * kLanes);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    const F32 value = broadcast(x[r][step]);
#pragma GCC unroll 4
    for (int v = 0; v < kBlockVectors; ++v) sum[r][v] = fma(value, weight[v], sum[r][v]);
  }
}

template <int kRows>
inline void add_step(const bf16* const (&x)[kRows], const bf16* down, int64_t step, bool whole,
                     F32 (&sum)[kRows][kBlockVectors]) {
  I32 weight[kBlockVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kBlockVectors; ++v) weight[v] = load_pairs(down + step * 2 * kRankBlock + v * 2 * kLanes);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    const I32 pair = broadcast_pair(x[r] + 2 * step, whole);
#pragma GCC unroll 4
    for (int v = 0; v < kBlockVectors; ++v) sum[r][v] = dot_pairs(sum[r][v], pair, weight[v]);
  }
}

// scale * x down^T for some rows and a block of ranks.
template <class T, int kRows>
void project(const LowRankArgs& args, const int32_t* rows, int64_t slot, int64_t part, int64_t block, Ahead& ahead) {
  const int64_t blocks = args.rank_blocks(), place = part * blocks + block, width = args.num_parts * blocks;
  const int64_t steps = ceil_div(args.depth, kStep<T>), whole = args.depth / kStep<T>;
  const T* down = static_cast<const T*>(args.down) + (slot * width + place) * steps * kStep<T> * kRankBlock;
  const T* x[kRows];
  for (int r = 0; r < kRows; ++r) {
    x[r] = static_cast<const T*>(args.x) + (args.x_rows == nullptr ? rows[r] : args.x_rows[rows[r]]) * args.x_stride;
  }
  F32 sum[kChains][kRows][kBlockVectors] = {};
  int64_t step = 0;
  for (; step + kChains <= whole; step += kChains) {
#pragma GCC unroll 4
    for (int chain = 0; chain < kChains; ++chain) {
      ahead.request();
      add_step(x, down, step + chain, true, sum[chain]);
    }
  }
  for (int chain = 0; step < steps; ++step, ++chain) add_step(x, down, step, step < whole, sum[chain]);
  const F32 scale = broadcast(args.scales[slot * args.num_parts + part]);
  for (int r = 0; r < kRows; ++r) {
    float* hidden = args.hidden + (rows[r] * width + place) * kRankBlock;
    for (int v = 0; v < kBlockVectors; ++v) {
      F32 total = sum[0][r][v];
      for (int chain = 1; chain < kChains; ++chain) total = total + sum[chain][r][v];
      store(hidden + v * kLanes, total * scale);
    }
  }
}

inline F32 bias_at(const LowRankArgs& args, int32_t row, int64_t column, int64_t left) {
  if (args.biases != nullptr) column += args.biases[row] * args.num_columns;
  return args.bias_dtype == DType::kFloat32 ? load_n(static_cast<const float*>(args.bias) + column, left)
                                            : load_n(static_cast<const bf16*>(args.bias) + column, left);
}

// Columns of rows that no adapter changes. Nothing changes if -0 is added, and +0 would turn -0 into +0.
void write_bias(const LowRankArgs& args, const RowGroup& group, int64_t begin, int64_t end) {
  for (int64_t column = begin; column < end; column += kLanes) {
    for (int32_t r = 0; r < group.count; ++r) {
      const F32 value = args.bias == nullptr ? broadcast(-0.0f) : bias_at(args, group.rows[r], column, end - column);
      float* out = args.out + group.rows[r] * args.out_stride() + column;
      store_n(out, value, end - column);
      if (args.factors != nullptr) store_n(out + args.num_columns, broadcast(1.0f), end - column);
    }
  }
}

template <class T, int kRows, int kVectors>
inline void expand_columns(const LowRankArgs& args, const int32_t* rows, const float* const (&hidden)[kRows],
                           const T* up, int64_t up_stride, const float* factors, int64_t rank, int64_t column,
                           int64_t left) {
  F32 sum[kRows][kVectors] = {};
  for (int64_t j = 0; j < rank; ++j) {
    F32 weight[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const T* const place = up + j * up_stride + column + v * kLanes;
      weight[v] = kVectors > 1 ? load(place) : load_n(place, left);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const F32 value = broadcast(hidden[r][j]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = fma(value, weight[v], sum[r][v]);
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = column + v * kLanes, lanes = left - v * kLanes;
    const F32 factor = factors == nullptr ? broadcast(1.0f) : load_n(factors + at, lanes);
    for (int r = 0; r < kRows; ++r) {
      float* out = args.out + rows[r] * args.out_stride() + at;
      const F32 value =
          args.bias == nullptr ? sum[r][v] * factor : fma(sum[r][v], factor, bias_at(args, rows[r], at, lanes));
      store_n(out, value, lanes);
      if (args.factors != nullptr) store_n(out + args.num_columns, factor, lanes);
    }
  }
}

// bias + hidden up^T for some rows and the columns [begin, end) of a part.
template <class T, int kRows>
void expand(const LowRankArgs& args, const int32_t* rows, int64_t slot, int64_t part, int64_t begin, int64_t end) {
  const int64_t blocks = args.rank_blocks(), width = args.num_parts * blocks;
  const float* hidden[kRows];
  for (int r = 0; r < kRows; ++r) hidden[r] = args.hidden + (rows[r] * width + part * blocks) * kRankBlock;
  const int64_t first = args.bounds[part], up_stride = args.bounds[part + 1] - first;
  const T* up = args.up_of<T>(slot, part) - first;
  const int64_t rank = args.rank(slot, part);
  const bool scaled = args.factors != nullptr && args.scaled[slot * args.num_parts + part] != 0;
  const float* factors = scaled ? args.factors + slot * args.num_columns : nullptr;
  int64_t column = begin;
  for (; column + kColumnVectors * kLanes <= end; column += kColumnVectors * kLanes) {
    expand_columns<T, kRows, kColumnVectors>(args, rows, hidden, up, up_stride, factors, rank, column, end - column);
  }
  for (; column < end; column += kLanes) {
    expand_columns<T, kRows, 1>(args, rows, hidden, up, up_stride, factors, rank, column, end - column);
  }
}

// Calls body(rows, Constant<number of rows>) for the rows of a group, a few at a time.
template <int kRows = kMostRows, class Body>
void with_rows(const int32_t* rows, int64_t count, const Body& body) {
  for (; count >= kRows; rows += kRows, count -= kRows) body(rows, Constant<kRows>());
  if constexpr (kRows > 1) {
    if (count > 0) with_rows<kRows - 1>(rows, count, body);
  }
}

// The rows of a group times the blocks [begin, end) of ranks of a part.
template <class T>
void project_group(const LowRankArgs& args, const RowGroup& group, int64_t part, int64_t begin, int64_t end,
                   Ahead ahead = {}) {
  for (int64_t block = begin; block < end && block * kRankBlock < args.rank(group.slot, part); ++block) {
    with_rows(group.rows, group.count, [&](const int32_t* rows, auto count) {
      project<T, count.kValue>(args, rows, group.slot, part, block, ahead);
    });
  }
}

template <class T>
void expand_group(const LowRankArgs& args, const RowGroup& group, int64_t part, int64_t begin, int64_t end) {
  if (group.slot < 0 || args.rank(group.slot, part) == 0) return write_bias(args, group, begin, end);
  with_rows(group.rows, group.count, [&](const int32_t* rows, auto count) {
    expand<T, count.kValue>(args, rows, group.slot, part, begin, end);
  });
}

template <class T>
void compute_group(const LowRankArgs& args, const RowGroup& group) {
  for (int64_t part = 0; part < args.num_parts; ++part) {
    const int64_t begin = args.bounds[part], end = args.bounds[part + 1];
    if (group.slot >= 0) {
      const char* up = reinterpret_cast<const char*>(args.up_of<T>(group.slot, part));
      const int64_t bytes = args.rank(group.slot, part) * (end - begin) * static_cast<int64_t>(sizeof(T));
      const int64_t steps = args.rank_blocks() * ceil_div(args.depth, kStep<T>);
      const Ahead ahead = {up, up + bytes, ceil_div(ceil_div(bytes, kCacheLine), steps)};
      project_group<T>(args, group, part, 0, args.rank_blocks(), ahead);
    }
    expand_group<T>(args, group, part, begin, end);
  }
}

template <class T>
void low_rank_of(const LowRankArgs& args) {
  const Groups all = group_rows(args);
  const int64_t blocks = args.rank_blocks(), width = args.num_parts * blocks;
  const bool parallel = args.num_rows * (args.depth + args.num_columns) * kRankBlock > kSmallWork;
  if (!parallel || all.count >= kGroupsPerThread * num_threads()) {
    parallel_for_if(parallel, all.count, [&](int64_t task) { compute_group<T>(args, all.groups[task]); });
    return;
  }
  parallel_for(all.count * width, [&](int64_t task) {
    const RowGroup& group = all.groups[task / width];
    const int64_t part = task % width / blocks, block = task % blocks;
    if (group.slot >= 0) project_group<T>(args, group, part, block, block + 1);
  });
  int64_t chunks = 0;
  for (int64_t part = 0; part < args.num_parts; ++part) {
    chunks += ceil_div(args.bounds[part + 1] - args.bounds[part], kChunkColumns);
  }
  parallel_for(all.count * chunks, [&](int64_t task) {
    const RowGroup& group = all.groups[task / chunks];
    int64_t part = 0, chunk = task % chunks;
    while (chunk >= ceil_div(args.bounds[part + 1] - args.bounds[part], kChunkColumns)) {
      chunk -= ceil_div(args.bounds[part + 1] - args.bounds[part], kChunkColumns);
      ++part;
    }
    const int64_t begin = args.bounds[part] + chunk * kChunkColumns;
    expand_group<T>(args, group, part, begin, min64(begin + kChunkColumns, args.bounds[part + 1]));
  });
}

}  // namespace

void low_rank(const LowRankArgs& args) {
  args.dtype == DType::kFloat32 ? low_rank_of<float>(args) : low_rank_of<bf16>(args);
}

}  // namespace shardline::SHARDLINE_ISA
