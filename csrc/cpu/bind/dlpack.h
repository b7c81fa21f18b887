// The part of DLPack 1.x that we use. The specification fixes the layout, so no torch header is needed.
#pragma once

#include <nanobind/nanobind.h>

#include "runtime/types.h"

namespace shardline {

struct DLDevice {
  int32_t type;
  int32_t id;
};

struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t rank;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DLManagedTensor {
  uint32_t major, minor;
  void* owner;
  void (*deleter)(DLManagedTensor* self);
  uint64_t flags;
  DLTensor tensor;
};

struct DLPackExchangeApi {
  uint32_t major, minor;
  DLPackExchangeApi* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object;
  int (*managed_tensor_to_py_object)(DLManagedTensor* tensor, void** object);
  int (*tensor_from_py_object)(void* object, DLTensor* out);
  void* current_work_stream;
};

constexpr int32_t kDLCpu = 1, kDLCudaHost = 3;
enum : uint8_t { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLBool = 6, kDLFloat8E4m3Fn = 10 };

// The exchange table of a Python type, or null if it has none.
const DLPackExchangeApi* exchange_api(PyTypeObject* type);

}  // namespace shardline
