#include "bind/bind.h"
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

}  // namespace

void bind_memory(nb::module_& m) {
  nb::class_<BufferToucher>(m, "PageToucher")
      .def(nb::init<nb::handle>(), "buffer"_a)
      .def("stop", &BufferToucher::stop)
      .def("wait", &BufferToucher::wait);
}

}  // namespace shardline
