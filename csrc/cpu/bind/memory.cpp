#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bind/bind.h"
#include "runtime/checked_copy.h"
#include "runtime/page_toucher.h"

namespace shardline {
namespace {

using namespace nanobind::literals;

// Holds the Python buffer whose pages are touched.
class BufferToucher {
 public:
  explicit BufferToucher(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_WRITABLE) != 0) throw nb::python_error();
    toucher_.emplace(buffer_.buf, static_cast<size_t>(buffer_.len));
  }
  ~BufferToucher() {
    toucher_.reset();
    PyBuffer_Release(&buffer_);
  }
  BufferToucher(const BufferToucher&) = delete;

  void stop() { toucher_->stop(); }
  void wait() {
    nb::gil_scoped_release release;
    toucher_->wait();
  }

 private:
  Py_buffer buffer_ = {};
  std::optional<PageToucher> toucher_;
};

// A block of each of the tensors [num_blocks, ...]. They must fill the slot, or a part of it.
std::vector<Piece> pieces_of(const std::vector<nb::object>& pages_objects, int64_t block, const Tensor& slot) {
  slot.is(DType::kUInt8).has_shape({-1}).is_contiguous();
  std::vector<Piece> pieces;
  pieces.reserve(pages_objects.size());
  size_t total = 0;
  for (const nb::object& object : pages_objects) {
    const Tensor pages(object, "pages");
    pages.is_contiguous();
    if (pages.rank() == 0 || block < 0 || block >= pages.size(0)) {
      raise_value_error("there is no block " + std::to_string(block));
    }
    const size_t size = static_cast<size_t>(pages.num_elements() / pages.size(0)) * element_size(pages.dtype());
    pieces.push_back({pages.as<unsigned char>() + static_cast<size_t>(block) * size, size});
    total += size;
  }
  if (total > static_cast<size_t>(slot.size(0))) raise_value_error("the slot is too small for the block");
  return pieces;
}

uint64_t copy_block_out(const std::vector<nb::object>& pages, int64_t block, nb::handle slot_object) {
  const Tensor slot(slot_object, "slot");
  const std::vector<Piece> pieces = pieces_of(pages, block, slot);
  nb::gil_scoped_release release;
  return copy_out(pieces, slot.as<unsigned char>());
}

uint64_t copy_block_in(nb::handle slot_object, const std::vector<nb::object>& pages, int64_t block) {
  const Tensor slot(slot_object, "slot");
  const std::vector<Piece> pieces = pieces_of(pages, block, slot);
  nb::gil_scoped_release release;
  return copy_in(slot.as<unsigned char>(), pieces);
}

uint64_t checksum_of(nb::handle object) {
  const Tensor memory(object, "memory");
  memory.is(DType::kUInt8).has_shape({-1}).is_contiguous();
  nb::gil_scoped_release release;
  return checksum(memory.as<unsigned char>(), static_cast<size_t>(memory.size(0)));
}

}  // namespace

void bind_memory(nb::module_& m) {
  m.def("copy_block_out", &copy_block_out, "pages"_a, "block"_a, "slot"_a);
  m.def("copy_block_in", &copy_block_in, "slot"_a, "pages"_a, "block"_a);
  m.def("checksum", &checksum_of, "memory"_a);
  nb::class_<BufferToucher>(m, "PageToucher")
      .def(nb::init<nb::handle>(), "buffer"_a)
      .def("stop", &BufferToucher::stop)
      .def("wait", &BufferToucher::wait);
}

}  // namespace shardline
