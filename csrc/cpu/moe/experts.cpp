#include "moe/experts.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "runtime/thread_pool.h"

namespace shardline {
namespace {

// More rows than this are worth the GEMM's own blocking. Fewer rows are computed panel by panel, all experts at once.
constexpr int64_t kWholeRows = 48;
constexpr int64_t kCopyTaskBytes = 1 << 16;

// Memory of the calling thread that stays from call to call: fresh pages would cost more than the work done in them.
class Buffer {
 public:
  ~Buffer() { std::free(data_); }
  void* get(int64_t num_bytes) {
    if (num_bytes > capacity_) {
      std::free(data_);
      capacity_ = (num_bytes + 4095) / 4096 * 4096;
      data_ = std::aligned_alloc(4096, static_cast<size_t>(capacity_));
      if (data_ == nullptr) {
        capacity_ = 0;
        throw std::bad_alloc();
      }
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  int64_t capacity_ = 0;
};

struct Workspace {
  Buffer rows, scales, sums;                       // x in the order of tokens, quantized
  Buffer sorted_rows, sorted_scales, sorted_sums;  // x sorted by expert
  Buffer products;
  SortedSlots slots;
  std::vector<int64_t> next;
  std::vector<int32_t> places;
};
thread_local Workspace workspace;

int64_t bytes_of(DType dtype) { return static_cast<int64_t>(element_size(dtype)); }

// The rows to multiply, sorted by expert: as they are, or as bytes with their scales and sums.
struct ExpertRows {
  DType dtype;
  const void* x;
  int64_t stride;  // elements
  const float* scales;
  const int32_t* sums;
  const float* group_sums;  // [rows, number of groups], for grouped weights with mins; or the scales of rounded rows
};

bool reads_quantized(WeightKind kind) { return kind == WeightKind::kInt8 || kind == WeightKind::kInt4; }

int64_t num_groups(int64_t depth) { return (depth + kGroupDepth - 1) / kGroupDepth; }

// out[i] = rows[index[i]]
void copy_rows(const char* rows, int64_t stride_bytes, int64_t row_bytes, const int32_t* index, int64_t count,
               char* out) {
  const int64_t per_task = std::max<int64_t>(1, kCopyTaskBytes / std::max<int64_t>(1, row_bytes));
  const int64_t num_tasks = (count + per_task - 1) / per_task;
  parallel_for_if(num_tasks > 1, num_tasks, [&](int64_t task) {
    for (int64_t i = task * per_task; i < std::min(count, (task + 1) * per_task); ++i) {
      std::memcpy(out + i * row_bytes, rows + index[i] * stride_bytes, static_cast<size_t>(row_bytes));
    }
  });
}

ExpertRows quantized_rows(DType dtype, const void* x, int64_t stride, int64_t depth, int64_t count, bool rotated) {
  Workspace& own = workspace;
  const int64_t groups = num_groups(depth);
  QuantizeRowsArgs args = {dtype, x, stride, nullptr, nullptr, nullptr, count, depth, rotated};
  args.values = static_cast<int8_t*>(own.rows.get(count * groups * kGroupDepth));
  args.scales = static_cast<float*>(own.scales.get(count * static_cast<int64_t>(sizeof(float))));
  args.sums = static_cast<int32_t*>(own.sums.get(count * (groups + 1) * static_cast<int64_t>(sizeof(int32_t))));
  kernels().quantize_rows(args);
  return {DType::kInt8, args.values, groups * kGroupDepth, args.scales, args.sums, nullptr};
}

ExpertRows sorted_rows(const ExpertRows& from, int64_t depth, const std::vector<int32_t>& tokens, int64_t count) {
  Workspace& own = workspace;
  ExpertRows to = from;
  to.stride = from.dtype == DType::kInt8 ? from.stride : depth;
  const auto sorted = [&](Buffer& buffer, const void* rows, int64_t stride_bytes, int64_t row_bytes) {
    char* out = static_cast<char*>(buffer.get(count * row_bytes));
    copy_rows(static_cast<const char*>(rows), stride_bytes, row_bytes, tokens.data(), count, out);
    return out;
  };
  const int64_t item = bytes_of(from.dtype);
  to.x = sorted(own.sorted_rows, from.x, from.stride * item, to.stride * item);
  if (from.dtype == DType::kInt8) {
    const int64_t sum_bytes = (num_groups(depth) + 1) * static_cast<int64_t>(sizeof(int32_t));
    to.scales = reinterpret_cast<float*>(sorted(own.sorted_scales, from.scales, sizeof(float), sizeof(float)));
    to.sums = reinterpret_cast<int32_t*>(sorted(own.sorted_sums, from.sums, sum_bytes, sum_bytes));
  }
  return to;
}

// Adds the sums of the groups of each row, if a weight has mins.
ExpertRows with_group_sums(ExpertRows rows, const ExpertStack& weight, int64_t depth, int64_t count) {
  if (weight.kind != WeightKind::kGrouped || weight.grouped.mins.data == nullptr) return rows;
  const int64_t bytes = count * weight.grouped.num_groups * static_cast<int64_t>(sizeof(float));
  float* sums = static_cast<float*>(workspace.sums.get(bytes));
  kernels().sum_groups({rows.dtype, rows.x, rows.stride, sums, count, depth, weight.grouped.group_size});
  rows.group_sums = sums;
  return rows;
}

// Puts the columns of rows that are sorted by expert in the order of their expert's packed columns.
ExpertRows with_ordered_columns(ExpertRows rows, const ExpertStack& weight, int64_t depth, const SortedSlots& slots) {
  if (weight.kind != WeightKind::kGrouped || weight.order == nullptr) return rows;
  const int64_t item = bytes_of(rows.dtype);
  char* out = static_cast<char*>(workspace.rows.get(slots.num_rows() * depth * item));
  for (size_t e = 0; e + 1 < slots.begins.size(); ++e) {
    const int64_t begin = slots.begins[e], count = slots.begins[e + 1] - begin;
    const char* x = static_cast<const char*>(rows.x) + begin * rows.stride * item;
    gather_columns({x, rows.stride, weight.order + static_cast<int64_t>(e) * depth, out + begin * depth * item, count,
                    depth, item});
  }
  rows.x = out;
  rows.stride = depth;
  return rows;
}

// Rounds rows that are sorted by expert to e4m3, each with the scale of its expert if that is fixed.
ExpertRows with_rounded_rows(ExpertRows rows, const ExpertStack& weight, int64_t depth, const SortedSlots& slots) {
  if (weight.kind != WeightKind::kGrouped || !weight.rounds_x) return rows;
  const int64_t count = slots.num_rows(), groups = weight.grouped.num_groups;
  float* scales = static_cast<float*>(workspace.scales.get(count * groups * static_cast<int64_t>(sizeof(float))));
  char* out = static_cast<char*>(workspace.rows.get(count * depth * bytes_of(rows.dtype)));
  const auto round = [&](int64_t begin, int64_t end, float fixed_scale) {
    if (begin == end) return;
    const char* x = static_cast<const char*>(rows.x) + begin * rows.stride * bytes_of(rows.dtype);
    kernels().round_rows_e4m3({rows.dtype, x, rows.stride, out + begin * depth * bytes_of(rows.dtype),
                               scales + begin * groups, end - begin, depth, weight.grouped.group_size, fixed_scale,
                               weight.input_bound});
  };
  for (size_t e = 0; e + 1 < slots.begins.size(); ++e)
    round(slots.begins[e], slots.begins[e + 1], weight.input_scales[e]);
  rows.x = out;
  rows.stride = depth;
  rows.group_sums = scales;
  return rows;
}

struct GroupedLinear {
  ExpertRows rows;
  ExpertStack weight;
  ExpertBias bias;
  DType out_dtype;
  char* out;
  int64_t depth, width;
};

// Multiplies rows [begin, begin + count) by panels [panel, panel + num_panels) of an expert.
void expert_product(const GroupedLinear& job, int64_t expert, int64_t begin, int64_t count, int64_t panel,
                    int64_t num_panels) {
  const int64_t column = panel * kPanelColumns;
  const int64_t columns = std::min(job.width - column, num_panels * kPanelColumns);
  const char* panels = job.weight.panels + (expert * job.weight.num_panels + panel) * job.weight.panel_bytes;
  char* out = job.out + (begin * job.width + column) * bytes_of(job.out_dtype);
  const auto set_bias = [&](auto& args) {
    if (job.bias.data == nullptr) return;
    const int64_t first = job.bias.row_stride != 0 ? begin * job.bias.row_stride : expert * job.width;
    args.bias = static_cast<const char*>(job.bias.data) + (first + column) * bytes_of(job.bias.dtype);
    args.bias_dtype = job.bias.dtype;
    args.bias_stride = job.bias.row_stride;
    args.factors = job.bias.factors;
  };
  const char* x = static_cast<const char*>(job.rows.x) + begin * job.rows.stride * bytes_of(job.rows.dtype);
  if (job.weight.kind == WeightKind::kFloating) {
    LinearArgs args = {};
    args.dtype = job.rows.dtype;
    args.out_dtype = job.out_dtype;
    args.x = x;
    args.x_stride = job.rows.stride;
    args.panels = panels;
    set_bias(args);
    args.out = out;
    args.out_stride = job.width;
    args.num_rows = count;
    args.num_columns = columns;
    args.depth = job.depth;
    return kernels().linear(args);
  }
  const int64_t first_panel = expert * job.weight.num_panels + panel;
  if (job.weight.kind == WeightKind::kGrouped) {
    GroupedLinearArgs args = job.weight.grouped;
    for (GroupNumbers* part : {&args.scales, &args.mins}) {
      if (part->data == nullptr) continue;
      part->data = static_cast<const char*>(part->data) + first_panel * part->panel_bytes(args.num_groups);
    }
    if (args.zeros != nullptr) args.zeros += first_panel * args.num_groups * kPanelColumns;
    if (args.mins.data != nullptr) args.x_sums = job.rows.group_sums + begin * args.num_groups;
    if (job.weight.rounds_x) args.x_scales = job.rows.group_sums + begin * args.num_groups;
    args.dtype = job.rows.dtype;
    args.out_dtype = job.out_dtype;
    args.x = x;
    args.x_stride = job.rows.stride;
    args.panels = reinterpret_cast<const uint8_t*>(panels);
    set_bias(args);
    args.out = out;
    args.out_stride = job.width;
    args.num_rows = count;
    args.num_columns = columns;
    args.depth = job.depth;
    return kernels().linear_grouped(args);
  }
  QuantizedLinearArgs args = {};
  args.out_dtype = job.out_dtype;
  args.x = reinterpret_cast<const int8_t*>(x);
  args.row_scales = job.rows.scales + begin;
  args.row_sums = job.rows.sums + begin * (num_groups(job.depth) + 1);
  args.panels = reinterpret_cast<const uint8_t*>(panels);
  set_bias(args);
  args.out = out;
  args.out_stride = job.width;
  args.num_rows = count;
  args.num_columns = columns;
  args.depth = job.depth;
  args.column_scales = job.weight.scales + first_panel * kPanelColumns;
  job.weight.kind == WeightKind::kInt4 ? kernels().linear_int4(args) : kernels().linear_int8(args);
}

void grouped_linear(const GroupedLinear& job, const std::vector<int64_t>& begins) {
  std::vector<int64_t> few;
  for (int64_t expert = 0; expert < job.weight.num_experts; ++expert) {
    const int64_t begin = begins[static_cast<size_t>(expert)];
    const int64_t count = begins[static_cast<size_t>(expert) + 1] - begin;
    if (count > kWholeRows) expert_product(job, expert, begin, count, 0, job.weight.num_panels);
    if (count > 0 && count <= kWholeRows) few.push_back(expert);
  }
  // A task multiplies on its own thread: the GEMM inside finds that the thread runs a task and wakes no others.
  parallel_for(static_cast<int64_t>(few.size()) * job.weight.num_panels, [&](int64_t task) {
    const int64_t expert = few[static_cast<size_t>(task / job.weight.num_panels)];
    const int64_t begin = begins[static_cast<size_t>(expert)];
    expert_product(job, expert, begin, begins[static_cast<size_t>(expert) + 1] - begin, task % job.weight.num_panels,
                   1);
  });
}

}  // namespace

const SortedSlots& sort_slots(const ExpertRange& range, bool compact) {
  SortedSlots& slots = workspace.slots;
  std::vector<int64_t>& next = workspace.next;
  const int64_t num_slots = range.num_tokens * range.experts_per_token;
  const auto local = [&](int64_t slot) {
    const int64_t expert = range.ids[slot] - range.first;
    return expert >= 0 && expert < range.count ? expert : -1;
  };
  slots.begins.assign(static_cast<size_t>(range.count) + 1, 0);
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    if (const int64_t expert = local(slot); expert >= 0) ++slots.begins[static_cast<size_t>(expert) + 1];
  }
  for (size_t e = 0; e < static_cast<size_t>(range.count); ++e) slots.begins[e + 1] += slots.begins[e];
  next.assign(slots.begins.begin(), slots.begins.end());
  slots.places.assign(static_cast<size_t>(num_slots), -1);
  slots.tokens.resize(static_cast<size_t>(slots.num_rows()));
  slots.num_tokens = 0;
  for (int64_t token = 0; token < range.num_tokens; ++token) {
    bool any = false;
    for (int64_t slot = token * range.experts_per_token; slot < (token + 1) * range.experts_per_token; ++slot) {
      const int64_t expert = local(slot);
      if (expert < 0) continue;
      any = true;
      const int64_t place = next[static_cast<size_t>(expert)]++;
      slots.places[static_cast<size_t>(slot)] = static_cast<int32_t>(place);
      slots.tokens[static_cast<size_t>(place)] = static_cast<int32_t>(compact ? slots.num_tokens : token);
    }
    if (any || !compact) ++slots.num_tokens;
  }
  return slots;
}

void expert_up(const ExpertUpArgs& args, const SortedSlots& slots) {
  const int64_t count = slots.num_rows();
  if (count == 0) return;
  ExpertRows rows = {args.dtype, args.x, args.x_stride, nullptr, nullptr, nullptr};
  if (reads_quantized(args.weight.kind)) {
    rows = quantized_rows(args.dtype, args.x, args.x_stride, args.depth, slots.num_tokens, args.weight.rotated);
  }
  const int64_t columns = args.gated ? 2 * args.width : args.width;
  void* products = workspace.products.get(count * columns * bytes_of(args.dtype));
  rows = with_ordered_columns(sorted_rows(rows, args.depth, slots.tokens, count), args.weight, args.depth, slots);
  rows = with_group_sums(rows, args.weight, args.depth, count);
  rows = with_rounded_rows(rows, args.weight, args.depth, slots);
  grouped_linear({rows, args.weight, args.bias, args.dtype, static_cast<char*>(products), args.depth, columns},
                 slots.begins);
  kernels().activation({args.dtype, args.activation, products, columns, args.out, count, args.width, args.gated});
}

const void* expert_down(const ExpertDownArgs& args, const SortedSlots& slots) {
  const int64_t count = slots.num_rows();
  void* products = workspace.products.get(count * args.width * bytes_of(args.out_dtype));
  if (count == 0) return products;
  ExpertRows rows = {args.dtype, args.x, args.depth, nullptr, nullptr, nullptr};
  if (reads_quantized(args.weight.kind)) {
    rows = quantized_rows(args.dtype, args.x, args.depth, args.depth, count, args.weight.rotated);
  }
  rows = with_ordered_columns(rows, args.weight, args.depth, slots);
  rows = with_group_sums(rows, args.weight, args.depth, count);
  rows = with_rounded_rows(rows, args.weight, args.depth, slots);
  grouped_linear({rows, args.weight, args.bias, args.out_dtype, static_cast<char*>(products), args.depth, args.width},
                 slots.begins);
  return products;
}

void unsort_rows(const SortedSlots& slots, const void* rows, int64_t row_bytes, void* out) {
  std::vector<int32_t>& order = workspace.places;
  order.clear();
  for (const int32_t place : slots.places) {
    if (place >= 0) order.push_back(place);
  }
  copy_rows(static_cast<const char*>(rows), row_bytes, row_bytes, order.data(), static_cast<int64_t>(order.size()),
            static_cast<char*>(out));
}

int64_t ExpertRanks::rank_of(int32_t expert) const {
  int64_t rank = 0;
  while (rank + 1 < num_ranks && expert >= expert_bounds[rank + 1]) ++rank;
  return rank;
}

namespace {

// Calls visit(rank) for the rank of every slot of a token, and once_per_rank(rank) for each of those ranks.
template <class Visit, class Once>
void for_each_rank(const ExpertRanks& ranks, const int32_t* ids, int64_t experts_per_token, const Visit& visit,
                   const Once& once_per_rank) {
  for (int64_t slot = 0; slot < experts_per_token; ++slot) {
    const int64_t rank = ranks.rank_of(ids[slot]);
    bool first = true;
    for (int64_t before = 0; before < slot; ++before) first = first && ranks.rank_of(ids[before]) != rank;
    visit(rank);
    if (first) once_per_rank(rank);
  }
}

}  // namespace

void count_exchanged(const ExpertRanks& ranks, const int32_t* ids, int64_t experts_per_token, int64_t* row_counts,
                     int64_t* slot_counts) {
  const int64_t n = ranks.num_ranks;
  std::fill(row_counts, row_counts + n * n, 0);
  std::fill(slot_counts, slot_counts + n * n, 0);
  for (int64_t owner = 0; owner < n; ++owner) {
    for (int64_t token = ranks.token_bounds[owner]; token < ranks.token_bounds[owner + 1]; ++token) {
      for_each_rank(
          ranks, ids + token * experts_per_token, experts_per_token,
          [&](int64_t rank) { ++slot_counts[rank * n + owner]; },
          [&](int64_t rank) { ++row_counts[owner * n + rank]; });
    }
  }
}

void place_slots(const int32_t* ids, int64_t num_tokens, int64_t experts_per_token, const int32_t* places,
                 int64_t width, const int32_t* copies, int64_t first_token, int32_t* out) {
  for (int64_t token = 0; token < num_tokens; ++token) {
    for (int64_t slot = token * experts_per_token; slot < (token + 1) * experts_per_token; ++slot) {
      const int64_t expert = ids[slot];
      out[slot] = places[expert * width + (first_token + token) % copies[expert]];
    }
  }
}

void pack_dispatch(const ExpertRanks& ranks, const int32_t* ids, int64_t num_tokens, int64_t experts_per_token,
                   const char* x, int64_t x_stride_bytes, int64_t row_bytes, char* out) {
  std::vector<std::vector<int32_t>> by_rank(static_cast<size_t>(ranks.num_ranks));
  for (int64_t token = 0; token < num_tokens; ++token) {
    for_each_rank(
        ranks, ids + token * experts_per_token, experts_per_token, [](int64_t) {},
        [&](int64_t rank) { by_rank[static_cast<size_t>(rank)].push_back(static_cast<int32_t>(token)); });
  }
  for (const std::vector<int32_t>& tokens : by_rank) {
    const int64_t count = static_cast<int64_t>(tokens.size());
    copy_rows(x, x_stride_bytes, row_bytes, tokens.data(), count, out);
    out += count * row_bytes;
  }
}

const std::vector<int32_t>& received_places(const ExpertRanks& ranks, const int32_t* ids, int64_t num_slots) {
  std::vector<int64_t>& next = workspace.next;
  next.assign(static_cast<size_t>(ranks.num_ranks) + 1, 0);
  for (int64_t slot = 0; slot < num_slots; ++slot) ++next[static_cast<size_t>(ranks.rank_of(ids[slot])) + 1];
  for (size_t rank = 0; rank < static_cast<size_t>(ranks.num_ranks); ++rank) next[rank + 1] += next[rank];
  std::vector<int32_t>& places = workspace.places;
  places.resize(static_cast<size_t>(num_slots));
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    places[static_cast<size_t>(slot)] = static_cast<int32_t>(next[static_cast<size_t>(ranks.rank_of(ids[slot]))]++);
  }
  return places;
}

}  // namespace shardline
