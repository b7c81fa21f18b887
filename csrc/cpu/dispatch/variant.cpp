#include "dispatch/variant.h"

#define SHARDLINE_STRING2(x) #x
#define SHARDLINE_STRING(x) SHARDLINE_STRING2(x)

namespace shardline::SHARDLINE_ISA {

extern const Kernels kKernels;
// clang-format off
const Kernels kKernels = {
    SHARDLINE_STRING(SHARDLINE_ISA),
#define SHARDLINE_KERNEL(result, name, ...) name,
    SHARDLINE_FOR_EACH_KERNEL(SHARDLINE_KERNEL)
#undef SHARDLINE_KERNEL
};
// clang-format on

}  // namespace shardline::SHARDLINE_ISA
