#include "variant.h"

#define SHARDLINE_STRING2(x) #x
#define SHARDLINE_STRING(x) SHARDLINE_STRING2(x)

namespace shardline::SHARDLINE_ISA {

extern const Kernels kKernels;
const Kernels kKernels = {
    SHARDLINE_STRING(SHARDLINE_ISA),
    pack_weight,
    linear,
    rms_norm,
    layer_norm,
    rope,
    activation,
    paged_attention,
    softcap,
    exp_shifted,
    argmax,
};

}  // namespace shardline::SHARDLINE_ISA
