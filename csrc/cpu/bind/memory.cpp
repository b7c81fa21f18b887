#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <vector>

#include "bind/bind.h"
#include "runtime/checked_copy.h"
#include "runtime/page_toucher.h"
#include "runtime/short_exponents.h"

namespace shardline {
namespace {

using namespace nanobind::literals;

// Holds the Python buffer whose pages are touched.
class BufferToucher {
 public:
  explicit BufferToucher(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_WRITABLE) != 0) throw nb::python_error();
    toucher_ = std::make_unique<PageToucher>(buffer_.buf, static_cast<size_t>(buffer_.len));
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
  std::unique_ptr<PageToucher> toucher_;
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

// Bytes whose number is a multiple of kStoredUnit.
Tensor unit_bytes(nb::handle object, const char* name) {
  const Tensor memory(object, name);
  memory.is(DType::kUInt8).has_shape({-1}).is_contiguous();
  if (memory.size(0) % static_cast<int64_t>(kStoredUnit) != 0) {
    raise_value_error(std::string(name) + " has a part of a unit");
  }
  return memory;
}

size_t shorten(nb::handle memory_object, nb::handle stored_object) {
  const Tensor memory = unit_bytes(memory_object, "memory"), stored = unit_bytes(stored_object, "stored");
  if (stored.size(0) < memory.size(0) || memory.size(0) >> 25 != 0) raise_value_error("memory is too large");
  nb::gil_scoped_release release;
  return shorten_exponents(memory.as<unsigned char>(), static_cast<size_t>(memory.size(0)), stored.as<unsigned char>());
}

void restore(nb::handle object, size_t stored_size) {
  const Tensor memory = unit_bytes(object, "memory");
  bool restored;
  {
    nb::gil_scoped_release release;
    restored = restore_exponents(memory.as<unsigned char>(), static_cast<size_t>(memory.size(0)), stored_size);
  }
  if (!restored) raise_value_error("memory has no shortened exponents");
}

}  // namespace

void bind_memory(nb::module_& m) {
  m.def("copy_block_out", &copy_block_out, "pages"_a, "block"_a, "slot"_a);
  m.def("copy_block_in", &copy_block_in, "slot"_a, "pages"_a, "block"_a);
  m.def("checksum", &checksum_of, "memory"_a);
  m.def("shorten_exponents", &shorten, "memory"_a, "stored"_a);
  m.def("restore_exponents", &restore, "memory"_a, "stored_size"_a);
  nb::class_<BufferToucher>(m, "PageToucher")
      .def(nb::init<nb::handle>(), "buffer"_a)
      .def("stop", &BufferToucher::stop)
      .def("wait", &BufferToucher::wait);
}

}  // namespace shardline
