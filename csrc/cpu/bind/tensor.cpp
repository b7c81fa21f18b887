#include "bind/tensor.h"

#include "bind/dlpack.h"

namespace shardline {
namespace {

DType dtype_of(DLDataType type) {
  if (type.lanes != 1) return DType::kOther;
  if (type.code == kDLFloat && type.bits == 32) return DType::kFloat32;
  if (type.code == kDLFloat && type.bits == 64) return DType::kFloat64;
  if (type.code == kDLFloat && type.bits == 16) return DType::kFloat16;
  if (type.code == kDLBfloat && type.bits == 16) return DType::kBFloat16;
  if (type.code == kDLFloat8E4m3Fn) return DType::kFloat8E4m3;
  if (type.code == kDLInt && type.bits == 8) return DType::kInt8;
  if (type.code == kDLInt && type.bits == 32) return DType::kInt32;
  if ((type.code == kDLInt || type.code == kDLUInt) && type.bits == 64) return DType::kInt64;
  if ((type.code == kDLUInt || type.code == kDLBool) && type.bits == 8) return DType::kUInt8;
  return DType::kOther;
}

const DLPackExchangeApi* find_exchange_api(PyTypeObject* type) {
  nb::object capsule =
      nb::getattr(nb::handle(reinterpret_cast<PyObject*>(type)), "__dlpack_c_exchange_api__", nb::none());
  if (capsule.is_none()) return nullptr;
  auto* api = static_cast<const DLPackExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (api == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  while (api != nullptr && api->major != 1) api = api->previous;
  return api != nullptr && api->tensor_from_py_object != nullptr ? api : nullptr;
}

}  // namespace

// Calls use one or two types (Tensor, Parameter), so remember the last one.
const DLPackExchangeApi* exchange_api(PyTypeObject* type) {
  thread_local PyTypeObject* last_type = nullptr;
  thread_local const DLPackExchangeApi* last_api = nullptr;
  if (type != last_type) {
    const DLPackExchangeApi* api = find_exchange_api(type);
    if (api == nullptr) return nullptr;
    Py_INCREF(type);  // never freed, so that no other type can get its address
    last_type = type;
    last_api = api;
  }
  return last_api;
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "float32";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat16: return "float16";
    case DType::kFloat64: return "float64";
    case DType::kFloat8E4m3: return "float8_e4m3fn";
    case DType::kUInt8: return "uint8 or bool";
    case DType::kInt8: return "int8";
    case DType::kInt32: return "int32";
    case DType::kInt64: return "int64";
    default: return "another dtype";
  }
}

void raise_type_error(const std::string& message) { throw nb::type_error(message.c_str()); }

void raise_value_error(const std::string& message) { throw nb::value_error(message.c_str()); }

Tensor::Tensor(nb::handle object, const char* name) : name_(name) {
  const DLPackExchangeApi* api = exchange_api(Py_TYPE(object.ptr()));
  if (api == nullptr) {
    raise_type_error(std::string(name) + " must be a torch.Tensor, not " + Py_TYPE(object.ptr())->tp_name);
  }
  DLTensor view;
  const bool exported = api->tensor_from_py_object(object.ptr(), &view) == 0;
  if (!exported) PyErr_Clear();  // torch's message is a C++ stack; meta and sparse tensors come here
  if (!exported || (view.device.type != kDLCpu && view.device.type != kDLCudaHost)) {
    raise_type_error(std::string(name) + " must be a dense tensor on the CPU");
  }
  data_ = static_cast<char*>(view.data) + view.byte_offset;
  dtype_ = dtype_of(view.dtype);
  rank_ = view.rank;
  shape_ = view.shape;
  strides_ = view.strides;
}

const Tensor& Tensor::is(DType dtype) const {
  if (dtype_ != dtype) {
    raise_type_error(std::string(name_) + " must be " + dtype_name(dtype) + ", not " + dtype_name(dtype_));
  }
  return *this;
}

const Tensor& Tensor::is_floating() const {
  if (dtype_ != DType::kFloat32 && dtype_ != DType::kBFloat16) {
    raise_type_error(std::string(name_) + " must be float32 or bfloat16, not " + dtype_name(dtype_));
  }
  return *this;
}

const Tensor& Tensor::same_dtype(const Tensor& other) const {
  if (dtype_ != other.dtype_) {
    raise_type_error(std::string(name_) + " is " + dtype_name(dtype_) + " but " + other.name_ + " is " +
                     dtype_name(other.dtype_));
  }
  return *this;
}

const Tensor& Tensor::has_shape(std::initializer_list<int64_t> sizes) const {
  bool matches = static_cast<size_t>(rank_) == sizes.size();
  std::string expected;
  int dim = 0;
  for (int64_t size : sizes) {
    matches = matches && (size < 0 || shape_[dim] == size);
    expected += (dim == 0 ? "" : ", ") + (size < 0 ? "*" : std::to_string(size));
    ++dim;
  }
  if (!matches) {
    raise_value_error(std::string(name_) + " has shape " + shape_text() + ", expected [" + expected + "]");
  }
  return *this;
}

bool Tensor::inner_contiguous(int first_dim) const {
  int64_t stride = 1;
  for (int dim = rank_ - 1; dim >= first_dim; --dim) {
    if (shape_[dim] != 1 && strides_ != nullptr && strides_[dim] != stride) return false;
    stride *= shape_[dim];
  }
  return true;
}

const Tensor& Tensor::has_rows() const {
  if (num_elements() != 0 && !inner_contiguous()) {
    raise_value_error(std::string(name_) + " must be contiguous, except for its first stride");
  }
  return *this;
}

const Tensor& Tensor::has_heads() const {
  if (num_elements() != 0 && !inner_contiguous(2)) {
    raise_value_error(std::string(name_) + " must be contiguous, except for its first two strides");
  }
  return *this;
}

const Tensor& Tensor::is_contiguous() const {
  if (num_elements() != 0 && (!inner_contiguous() || (rank_ > 0 && row_stride() != row_elements()))) {
    raise_value_error(std::string(name_) + " must be contiguous");
  }
  return *this;
}

int64_t Tensor::num_elements() const {
  int64_t count = 1;
  for (int dim = 0; dim < rank_; ++dim) count *= shape_[dim];
  return count;
}

int64_t Tensor::row_stride() const { return shape_[0] <= 1 || strides_ == nullptr ? row_elements() : strides_[0]; }

int64_t Tensor::head_stride() const {
  return shape_[1] <= 1 || strides_ == nullptr ? row_elements() / (shape_[1] > 0 ? shape_[1] : 1) : strides_[1];
}

int64_t Tensor::row_elements() const {
  int64_t count = 1;
  for (int dim = 1; dim < rank_; ++dim) count *= shape_[dim];
  return count;
}

std::string Tensor::shape_text() const {
  std::string text = "[";
  for (int dim = 0; dim < rank_; ++dim) text += (dim == 0 ? "" : ", ") + std::to_string(shape_[dim]);
  return text + "]";
}

}  // namespace shardline
