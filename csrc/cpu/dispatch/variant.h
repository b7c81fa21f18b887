// The entry points that the kernel sources define for every ISA.
#pragma once

#include "dispatch/kernels.h"

namespace shardline::SHARDLINE_ISA {

#define SHARDLINE_KERNEL(result, name, ...) result name(__VA_ARGS__);
SHARDLINE_FOR_EACH_KERNEL(SHARDLINE_KERNEL)
#undef SHARDLINE_KERNEL

}  // namespace shardline::SHARDLINE_ISA
