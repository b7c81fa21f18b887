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
    add,
    rope,
    activation,
    paged_attention,
    mla_attention,
    softcap,
    exp_shifted,
    argmax,
    write_kv,
    quantize_rows,
    pack_int8,
    linear_int8,
    pack_int4,
    linear_int4,
    combine,
};

}  // namespace shardline::SHARDLINE_ISA
