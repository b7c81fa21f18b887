// A borrowed view of a torch.Tensor, taken through torch's DLPack exchange table (0.05 us; no torch header needed).
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <string>

#include "runtime/types.h"

namespace shardline {

namespace nb = nanobind;

// Valid while the Python object lives and is not resized. The checks raise TypeError or ValueError and name the
// argument.
class Tensor {
 public:
  Tensor(nb::handle object, const char* name);

  const Tensor& is(DType dtype) const;
  const Tensor& is_floating() const;  // float32 or bfloat16
  const Tensor& same_dtype(const Tensor& other) const;
  // One entry per dimension; -1 matches any size.
  const Tensor& has_shape(std::initializer_list<int64_t> sizes) const;
  const Tensor& is_contiguous() const;
  // Contiguous except for the first dimension's stride, like a slice of columns.
  const Tensor& has_rows() const;
  // Contiguous except for the first two dimensions' strides, like a slice of each head.
  const Tensor& has_heads() const;

  void* data() const { return data_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  DType dtype() const { return dtype_; }
  int rank() const { return rank_; }
  const int64_t* shape() const { return shape_; }
  int64_t size(int dim) const { return shape_[dim]; }
  int64_t num_elements() const;
  int64_t row_stride() const;
  int64_t head_stride() const;  // of the second dimension

 private:
  int64_t row_elements() const;
  bool inner_contiguous(int first_dim = 1) const;
  std::string shape_text() const;

  const char* name_;
  void* data_;
  DType dtype_;
  int rank_;
  const int64_t* shape_;
  const int64_t* strides_;
};

const char* dtype_name(DType dtype);

[[noreturn]] void raise_type_error(const std::string& message);
[[noreturn]] void raise_value_error(const std::string& message);

}  // namespace shardline
