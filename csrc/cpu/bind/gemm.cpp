// Python entry points of the GEMM: check the tensors, fill in the arguments, release the GIL.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <string>

#include "bind/bind.h"
#include "bind/tensor.h"
#include "dispatch/kernels.h"
#include "gemm/packed_rows.h"
#include "runtime/program.h"
#include "runtime/thread_pool.h"

namespace shardline {
namespace {

using namespace nanobind::literals;

// num_panels -1 stands for any number.
void check_panels_shape(const Tensor& panels, int64_t num_panels, int64_t depth) {
  const bool pairs = panels.dtype() == DType::kBFloat16;
  const int64_t padded_depth = pairs ? (depth + 1) / 2 * 2 : depth;
  panels.is_floating().has_shape({num_panels, padded_depth, kPanelColumns}).is_contiguous();
  if (depth < 1) raise_value_error("a weight needs at least one input feature");
}

void check_panels(const Tensor& panels, int64_t num_columns, int64_t depth) {
  check_panels_shape(panels, (num_columns + kPanelColumns - 1) / kPanelColumns, depth);
}

void pack_weight(nb::handle weight_object, nb::handle panels_object, int64_t first, std::optional<int64_t> half) {
  const Tensor weight(weight_object, "weight"), panels(panels_object, "panels");
  weight.is_floating().has_shape({-1, -1}).has_rows().same_dtype(panels);
  check_panels_shape(panels, -1, weight.size(1));
  const PackArgs args = {weight.dtype(),
                         weight.data(),
                         weight.row_stride(),
                         panels.data(),
                         weight.size(0),
                         weight.size(1),
                         panel_columns(panels, weight.size(0), first, half)};
  nb::gil_scoped_release release;
  kernels().pack_weight(args);
}

void packed_rows_of(nb::handle panels_object, nb::handle indices_object, nb::handle out_object) {
  const Tensor panels(panels_object, "panels"), indices(indices_object, "indices"), out(out_object, "out");
  indices.is(DType::kInt64).has_shape({-1}).is_contiguous();
  out.is_floating().same_dtype(panels).has_shape({indices.size(0), -1}).is_contiguous();
  const int64_t num_panels = panels.size(0), element_bytes = out.dtype() == DType::kFloat32 ? 4 : 2;
  check_panels(panels, num_panels * kPanelColumns, out.size(1));
  for (int64_t row = 0; row < indices.size(0); ++row) {
    const int64_t index = indices.as<int64_t>()[row];
    if (index < 0 || index >= num_panels * kPanelColumns) raise_value_error("an index is outside the weight");
  }
  const PackedRowsArgs args = {panels.data(),
                               indices.as<int64_t>(),
                               out.data(),
                               indices.size(0),
                               panels.size(1) * element_bytes / 4,
                               out.size(1) * element_bytes};
  nb::gil_scoped_release release;
  packed_rows(args);
}

// Fills in all arguments except the output.
LinearArgs linear_args(const Tensor& x, const Tensor& panels, nb::handle bias_object, int64_t num_columns, bool gated) {
  x.is_floating().has_shape({-1, -1}).has_rows().same_dtype(panels);
  check_panels(panels, gated ? gated_weight_columns(num_columns) : num_columns, x.size(1));
  LinearArgs args = {};
  args.dtype = x.dtype();
  args.x = x.data();
  args.x_stride = x.row_stride();
  args.panels = panels.data();
  set_bias(args, bias_object, x.size(0), gated ? 2 * num_columns : num_columns);
  args.num_rows = x.size(0);
  args.num_columns = num_columns;
  args.depth = x.size(1);
  args.gated = gated;
  return args;
}

void linear(nb::handle x_object, nb::handle panels_object, nb::handle bias_object, nb::handle out_object,
            const std::optional<std::string>& gate) {
  const Tensor x(x_object, "x"), panels(panels_object, "panels"), out(out_object, "out");
  out.is_floating().has_shape({x.size(0), -1}).has_rows();
  LinearArgs args = linear_args(x, panels, bias_object, out.size(1), gate.has_value());
  args.out_dtype = out.dtype();
  args.out = out.data();
  args.out_stride = out.row_stride();
  if (gate) args.activation = activation_named(*gate);
  perform([args] { kernels().linear(args); });
}

void linear_best(nb::handle x_object, nb::handle panels_object, nb::handle bias_object, int64_t num_columns,
                 nb::handle allowed, nb::handle best_object) {
  const Tensor x(x_object, "x"), panels(panels_object, "panels"), best(best_object, "best");
  LinearArgs args = linear_args(x, panels, bias_object, num_columns, false);
  best.is(DType::kFloat32).has_shape({x.size(0), 2, panels.size(0)}).is_contiguous();
  args.out_dtype = DType::kFloat32;
  args.out = best.data();
  args.out_stride = 2 * panels.size(0);
  check_shared_bias(args);
  args.best = true;
  args.allowed = allowed_columns(allowed, best);
  perform([args] { kernels().linear(args); });
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Memory on huge pages, where weights lie too. The threads that will read it write it first, with small numbers.
std::unique_ptr<char, Free> filled_memory(int64_t num_bytes) {
  constexpr int64_t kHugePage = 2 << 20;
  const int64_t num_pages = (num_bytes + kHugePage - 1) / kHugePage;
  std::unique_ptr<char, Free> memory(static_cast<char*>(std::aligned_alloc(kHugePage, num_pages * kHugePage)));
  if (memory == nullptr) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(memory.get(), num_pages * kHugePage, MADV_HUGEPAGE);
#endif
  parallel_for(num_pages, [&](int64_t page) { std::memset(memory.get() + page * kHugePage, 0x3c, kHugePage); });
  return memory;
}

// Times products of x [num_rows, depth] and a weight [num_columns, depth], in bf16 if `narrow`, else in fp32, for about
// `seconds`. Returns the time of the fastest one. It needs no tensors, so a process without torch can call it.
double product_seconds(int64_t num_rows, int64_t num_columns, int64_t depth, bool narrow, double seconds) {
  if (num_rows < 1 || num_columns < 1 || depth < 1) raise_value_error("a product needs rows, columns and a depth");
  nb::gil_scoped_release release;
  const int64_t element_bytes = narrow ? 2 : 4, padded_depth = (depth + 1) / 2 * 2;
  const int64_t num_panels = (num_columns + kPanelColumns - 1) / kPanelColumns;
  const auto x = filled_memory(num_rows * depth * element_bytes);
  const auto panels = filled_memory(num_panels * padded_depth * kPanelColumns * element_bytes);
  const auto out = filled_memory(num_rows * num_columns * element_bytes);
  LinearArgs args = {};
  args.dtype = args.out_dtype = narrow ? DType::kBFloat16 : DType::kFloat32;
  args.x = x.get();
  args.x_stride = args.depth = depth;
  args.panels = panels.get();
  args.out = out.get();
  args.out_stride = args.num_columns = num_columns;
  args.num_rows = num_rows;
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  const auto began = Clock::now();
  double best = 0.0;
  do {
    const auto start = Clock::now();
    kernels().linear(args);
    const double passed = since(start);
    best = best > 0.0 ? std::min(best, passed) : passed;
  } while (since(began) < seconds);
  return best;
}

}  // namespace

void bind_gemm(nb::module_& m) {
  m.def("product_seconds", &product_seconds, "num_rows"_a, "num_columns"_a, "depth"_a, "narrow"_a, "seconds"_a);
  m.def("pack_weight", &pack_weight, "weight"_a, "panels"_a, "first"_a = 0, "half"_a = nb::none());
  m.def("linear", &linear, "x"_a, "panels"_a, "bias"_a.none(), "out"_a, "gate"_a = nb::none());
  m.def("packed_rows", &packed_rows_of, "panels"_a, "indices"_a, "out"_a);
  m.def("linear_best", &linear_best, "x"_a, "panels"_a, "bias"_a.none(), "num_columns"_a, "allowed"_a.none(), "best"_a);
}

}  // namespace shardline
