// The groups of ranks for Python: one class over shared memory and one over sockets, with the same methods.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "bind/exchange.h"
#include "dispatch/kernels.h"
#include "exchange/shared_group.h"
#include "exchange/socket_group.h"
#include "runtime/program.h"
#include "runtime/thread_pool.h"

namespace shardline {
namespace {

using namespace nanobind::literals;

// Quantizes rows [first, first + count) of args. Each row is made of a piece from every rank, and the joined row exists
// only in the cache.
void quantize_joined(const QuantizeRowsArgs& args, const std::vector<int64_t>& row_bytes, int64_t first, int64_t count,
                     const std::vector<const char*>& pieces) {
  constexpr int64_t kRowsAtOnce = 4;
  const int64_t num_groups = (args.depth + kGroupDepth - 1) / kGroupDepth;
  const size_t joined_bytes = static_cast<size_t>(args.depth) * element_size(args.dtype);
  parallel_for((count + kRowsAtOnce - 1) / kRowsAtOnce, [&](int64_t task) {
    const int64_t begin = task * kRowsAtOnce, end = std::min(count, begin + kRowsAtOnce);
    char* joined = static_cast<char*>(thread_scratch(kRowsAtOnce * joined_bytes));
    QuantizeRowsArgs some = args;
    some.x = joined;
    some.values += (first + begin) * num_groups * kGroupDepth;
    some.scales += first + begin;
    some.sums += (first + begin) * (1 + num_groups);
    some.num_rows = end - begin;
    for (int64_t row = begin; row < end; ++row) {
      for (size_t r = 0; r < pieces.size(); ++r) {
        if (row_bytes[r] == 0) continue;  // this rank has no columns, and perhaps no memory
        std::memcpy(joined, pieces[r] + row * row_bytes[r], static_cast<size_t>(row_bytes[r]));
        joined += row_bytes[r];
      }
    }
    kernels().quantize_rows(some);
  });
}

class PyGroup {
 public:
  void barrier(std::optional<double> timeout_s) {
    exchange(timeout_s, [this, timeout_s] { return group_->barrier(seconds(timeout_s), interrupted); });
  }

  void all_gather_columns(nb::handle local_object, const std::vector<int64_t>& widths, nb::handle out_object,
                          std::optional<double> timeout_s) {
    const Tensor local(local_object, "local"), out(out_object, "out");
    int64_t total = 0;
    for (int64_t width : widths) total += width;
    check_counts(widths);
    local.has_shape({-1, own(widths)}).is_contiguous();
    out.same_dtype(local).has_shape({local.size(0), total}).is_contiguous();
    const int64_t item = item_size(local);
    std::vector<GatherPart> parts;
    int64_t offset = 0;
    for (int64_t width : widths) {
      parts.push_back({local.size(0), width * item, offset * item, total * item});
      offset += width;
    }
    gather(local, parts, out, timeout_s);
  }

  void all_gather_quantized(nb::handle local_object, const std::vector<int64_t>& widths, nb::handle values_object,
                            nb::handle scales_object, nb::handle sums_object, std::optional<double> timeout_s) {
    const Tensor local(local_object, "local"), values(values_object, "values"), scales(scales_object, "scales");
    const Tensor sums(sums_object, "sums");
    check_counts(widths);
    local.is_floating().has_shape({-1, own(widths)}).is_contiguous();
    const int64_t num_rows = local.size(0), depth = std::accumulate(widths.begin(), widths.end(), int64_t{0});
    check_quantized_rows(values, scales, sums, num_rows, depth);
    std::vector<int64_t> row_bytes;
    for (int64_t width : widths) row_bytes.push_back(width * item_size(local));
    const QuantizeRowsArgs to = {
        local.dtype(), nullptr, depth, values.as<int8_t>(), scales.as<float>(), sums.as<int32_t>(), 0, depth, false};
    exchange(timeout_s, [this, timeout_s, row_bytes, to, num_rows, from = local.data()] {
      const auto take = [&](int64_t first, int64_t count, const std::vector<const char*>& pieces) {
        quantize_joined(to, row_bytes, first, count, pieces);
      };
      return group_->gather_rows(from, num_rows, row_bytes, take, seconds(timeout_s), interrupted);
    });
  }

  void all_gather_rows(nb::handle local_object, const std::vector<int64_t>& counts, nb::handle out_object,
                       std::optional<double> timeout_s) {
    const Tensor local(local_object, "local"), out(out_object, "out");
    int64_t total = 0;
    for (int64_t count : counts) total += count;
    check_counts(counts);
    local.has_shape({own(counts), -1}).is_contiguous();
    out.same_dtype(local).has_shape({total, local.size(1)}).is_contiguous();
    const int64_t row_bytes = local.size(1) * item_size(local);
    std::vector<GatherPart> parts;
    int64_t offset = 0;
    for (int64_t count : counts) {
      parts.push_back({1, count * row_bytes, offset * row_bytes, 0});
      offset += count;
    }
    gather(local, parts, out, timeout_s);
  }

  void all_to_all_rows(nb::handle local_object, nb::handle counts_object, nb::handle out_object,
                       std::optional<double> timeout_s) {
    const Tensor local(local_object, "local"), counts_tensor(counts_object, "counts"), out(out_object, "out");
    counts_tensor.is(DType::kInt64).has_shape({group_->size(), group_->size()}).is_contiguous();
    local.has_shape({-1, -1}).is_contiguous();
    out.same_dtype(local).has_shape({-1, local.size(1)}).is_contiguous();
    if (group_->rank() < 0) raise_value_error("an observer takes no part in collectives");
    exchange(timeout_s,
             [this, timeout_s, counts = counts_tensor.as<int64_t>(), from = local.data(), to = out.data(),
              local_rows = local.size(0), out_rows = out.size(0), row_bytes = local.size(1) * item_size(local)] {
               check_exchange(counts, local_rows, out_rows);
               return group_->all_to_all_rows(from, counts, row_bytes, to, seconds(timeout_s), interrupted);
             });
  }

  void all_reduce_sum(nb::handle x_object, std::optional<double> timeout_s) {
    const Tensor x(x_object, "x");
    x.is_floating().is_contiguous();
    exchange(timeout_s, [this, timeout_s, data = x.data(), count = x.num_elements(), dtype = x.dtype()] {
      return group_->all_reduce_sum(data, count, dtype, seconds(timeout_s), interrupted);
    });
  }

  void abort() { group_->abort(); }
  bool aborted() const { return group_->aborted() != 0; }
  int rank() const { return group_->rank(); }
  int size() const { return group_->size(); }

 protected:
  const Group& group() const { return *group_; }

  PyGroup(std::unique_ptr<Group> group, nb::handle progress) : group_(std::move(group)) {
    if (progress.is_none()) return;
    progress_.emplace(progress, true);
    constexpr int64_t kLeastBytes = 2 * static_cast<int64_t>(sizeof(int64_t));
    if (progress_->size() < kLeastBytes) raise_value_error("progress must have room for two int64");
  }

 private:
  static int64_t item_size(const Tensor& tensor) {
    if (tensor.dtype() == DType::kOther) raise_type_error("local has an unsupported dtype");
    return static_cast<int64_t>(element_size(tensor.dtype()));
  }

  void check_counts(const std::vector<int64_t>& counts) const {
    if (counts.size() != static_cast<size_t>(group_->size())) raise_value_error("one size per rank is needed");
    for (int64_t count : counts) {
      if (count < 0) raise_value_error("sizes must not be negative");
    }
    if (group_->rank() < 0) raise_value_error("an observer takes no part in collectives");
  }

  // counts [size, size]: the rows that each rank sends to each other.
  void check_exchange(const int64_t* counts, int64_t local_rows, int64_t out_rows) const {
    const int64_t size = group_->size(), rank = group_->rank();
    int64_t sent = 0, received = 0;
    for (int64_t i = 0; i < size * size; ++i) {
      if (counts[i] < 0) raise_value_error("sizes must not be negative");
    }
    for (int64_t r = 0; r < size; ++r) {
      sent += counts[rank * size + r];
      received += counts[r * size + rank];
    }
    if (sent > local_rows || received > out_rows) {
      raise_value_error("counts name " + std::to_string(sent) + " rows to send and " + std::to_string(received) +
                        " to receive, local and out have " + std::to_string(local_rows) + " and " +
                        std::to_string(out_rows));
    }
  }

  int64_t own(const std::vector<int64_t>& counts) const { return counts[static_cast<size_t>(group_->rank())]; }

  void gather(const Tensor& local, const std::vector<GatherPart>& parts, const Tensor& out,
              std::optional<double> timeout_s) {
    exchange(timeout_s, [this, timeout_s, parts, from = local.data(), to = out.data()] {
      return group_->all_gather(from, parts, to, seconds(timeout_s), interrupted);
    });
  }

  // Runs a collective, and keeps it if a program records. The progress line says whether the rank waits. A rank whose
  // exchange failed still counts as waiting.
  template <class Collective>
  void exchange(std::optional<double> timeout_s, Collective collective) {
    perform([this, timeout_s, collective] {
      auto* line = progress_ ? static_cast<int64_t*>(progress_->data()) : nullptr;
      if (line != nullptr) {
        __atomic_store_n(line, line[0] + 1, __ATOMIC_RELAXED);
        __atomic_store_n(line + 1, 1, __ATOMIC_RELAXED);
      }
      const WaitStatus status = collective();
      if (status != WaitStatus::kDone) {
        nb::gil_scoped_acquire acquire;
        fail(status, timeout_s);
      }
      if (line != nullptr) __atomic_store_n(line + 1, 0, __ATOMIC_RELAXED);
    });
  }

  [[noreturn]] void fail(WaitStatus status, std::optional<double> timeout_s) const {
    if (status == WaitStatus::kInterrupted) throw nb::python_error();
    if (status == WaitStatus::kAborted) {
      const uint32_t by = group_->aborted();
      raise(collective_aborted, by >= 2 ? "the group was aborted by rank " + std::to_string(by - 2)
                                        : std::string("the group was aborted by an observer"));
    }
    const std::vector<int> missing = group_->missing();
    const std::string message = "rank " + std::to_string(group_->rank()) + " waited " +
                                std::to_string(seconds(timeout_s)) + " s at barrier " +
                                std::to_string(group_->epoch()) + "; not arrived: " + group_->name_ranks(missing);
    nb::object error = nb::handle(PyExc_TimeoutError)(message);
    error.attr("missing_ranks") = missing;
    PyErr_SetObject(PyExc_TimeoutError, error.ptr());
    throw nb::python_error();
  }

  const std::unique_ptr<Group> group_;
  std::optional<Memory> progress_;  // int64: arrivals, then whether the rank waits
};

class PySharedGroup final : public PyGroup {
 public:
  PySharedGroup(nb::handle buffer, int rank, int size, std::optional<int> spin_iterations, nb::handle progress)
      : PySharedGroup(std::make_unique<Memory>(buffer, true), rank, size, spin_iterations, progress) {}

  std::vector<uint64_t> arrived() const { return static_cast<const SharedGroup&>(group()).arrived(); }

 private:
  PySharedGroup(std::unique_ptr<Memory> memory, int rank, int size, std::optional<int> spin_iterations,
                nb::handle progress)
      : PyGroup(std::make_unique<SharedGroup>(memory->data(), static_cast<size_t>(memory->size()), rank, size,
                                              spin_iterations_for(spin_iterations, size)),
                progress),
        memory_(std::move(memory)) {}

  std::unique_ptr<Memory> memory_;
};

class PySocketGroup final : public PyGroup {
 public:
  PySocketGroup(const std::vector<int>& fds, int rank, const std::vector<std::string>& names,
                std::optional<int> spin_iterations, nb::handle progress)
      : PyGroup(std::make_unique<SocketGroup>(fds, rank, names, socket_spin_iterations_for(spin_iterations)),
                progress) {}
};

}  // namespace

void bind_groups(nb::module_& m) {
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const PeerLost& lost) {
      PyErr_SetString(PyExc_ConnectionError, lost.what());
    }
  });

  nb::class_<PyGroup>(m, "Group")
      .def("barrier", &PyGroup::barrier, "timeout_s"_a.none() = nb::none())
      .def("all_gather_columns", &PyGroup::all_gather_columns, "local"_a, "widths"_a, "out"_a,
           "timeout_s"_a.none() = nb::none())
      .def("all_gather_rows", &PyGroup::all_gather_rows, "local"_a, "counts"_a, "out"_a,
           "timeout_s"_a.none() = nb::none())
      .def("all_gather_quantized", &PyGroup::all_gather_quantized, "local"_a, "widths"_a, "values"_a, "scales"_a,
           "sums"_a, "timeout_s"_a.none() = nb::none())
      .def("all_to_all_rows", &PyGroup::all_to_all_rows, "local"_a, "counts"_a, "out"_a,
           "timeout_s"_a.none() = nb::none())
      .def("all_reduce_sum", &PyGroup::all_reduce_sum, "x"_a, "timeout_s"_a.none() = nb::none())
      .def("abort", &PyGroup::abort)
      .def_prop_ro("aborted", &PyGroup::aborted)
      .def_prop_ro("rank", &PyGroup::rank)
      .def_prop_ro("size", &PyGroup::size);

  nb::class_<PySharedGroup, PyGroup>(m, "SharedGroup")
      .def(nb::init<nb::handle, int, int, std::optional<int>, nb::handle>(), "buffer"_a, "rank"_a, "size"_a,
           "spin_iterations"_a.none() = nb::none(), "progress"_a.none() = nb::none())
      .def_static("required_bytes", &SharedGroup::required_bytes, "size"_a, "data_bytes"_a)
      .def("arrived", &PySharedGroup::arrived);

  nb::class_<PySocketGroup, PyGroup>(m, "SocketGroup")
      .def(nb::init<const std::vector<int>&, int, const std::vector<std::string>&, std::optional<int>, nb::handle>(),
           "fds"_a, "rank"_a, "names"_a, "spin_iterations"_a.none() = nb::none(), "progress"_a.none() = nb::none());
}

}  // namespace shardline
