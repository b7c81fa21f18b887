// What the bindings of groups and of links have in common. Waiting releases the GIL, and notices Ctrl-C within a slice
// of time.
#pragma once

#include <cmath>
#include <optional>
#include <string>

#include "bind/bind.h"
#include "bind/tensor.h"
#include "runtime/wait.h"

namespace shardline {

extern PyObject* collective_aborted;  // shardline._cpu.CollectiveAborted

// The bytes of a contiguous CPU tensor or of any object with the buffer protocol. The object is held while this lives.
class Memory {
 public:
  Memory(nb::handle object, bool writable) : owner_(nb::borrow(object)) {
    if (PyObject_CheckBuffer(object.ptr())) {
      if (PyObject_GetBuffer(object.ptr(), &buffer_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
        throw nb::python_error();
      }
      data_ = buffer_.buf;
      size_ = buffer_.len;
      return;
    }
    const Tensor tensor(object, "data");
    tensor.is_contiguous();
    if (tensor.dtype() == DType::kOther) raise_type_error("data has an unsupported dtype");
    data_ = tensor.data();
    size_ = tensor.num_elements() * static_cast<int64_t>(element_size(tensor.dtype()));
  }
  ~Memory() {
    if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
  }
  Memory(const Memory&) = delete;

  void* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  nb::object owner_;
  Py_buffer buffer_ = {};
  void* data_ = nullptr;
  int64_t size_ = 0;
};

inline bool interrupted() {
  nb::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

inline double seconds(std::optional<double> timeout_s) { return timeout_s.value_or(INFINITY); }

// If there are more threads than cores, spinning threads take cores from the others: spin only briefly.
inline int spin_iterations_for(std::optional<int> wanted, int size) {
  return wanted.value_or(size <= allowed_cpus() ? 20000 : 50);
}

[[noreturn]] inline void raise(PyObject* type, const std::string& message) {
  PyErr_SetString(type, message.c_str());
  throw nb::python_error();
}

// If there are more threads than cores, spinning threads take cores from the others: spin only briefly. Here a turn is
// a system call.
inline int socket_spin_iterations_for(std::optional<int> wanted) {
  return wanted.value_or(allowed_cpus() > 1 ? 2000 : 16);
}

}  // namespace shardline
