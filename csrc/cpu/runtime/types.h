#pragma once

#include <cstddef>
#include <cstdint>

namespace shardline {

struct bf16 {
  uint16_t bits;
};

enum class DType : uint8_t {
  kFloat32,
  kBFloat16,
  kFloat16,
  kFloat64,
  kFloat8E4m3,
  kUInt8,
  kInt8,
  kInt32,
  kInt64,
  kOther
};

inline size_t element_size(DType dtype) {
  switch (dtype) {
    case DType::kFloat8E4m3:
    case DType::kUInt8:
    case DType::kInt8: return 1;
    case DType::kBFloat16:
    case DType::kFloat16: return 2;
    case DType::kFloat32:
    case DType::kInt32: return 4;
    default: return 8;
  }
}

}  // namespace shardline
