// Activations, alone or gating: act(gate) * up. In fp32; a gated bf16 result is rounded after the activation and again
// after the product, as eager torch does.
#include "thread_pool.h"
#include "variant.h"
#include "vec_math.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int64_t kTaskElements = 1 << 13;

struct Silu {
  static F32 of(F32 x) { return x * sigmoid(x); }
};
struct GeluTanh {
  // (1 + tanh(u)) / 2 is sigmoid(2u), which does not cancel on the left.
  static F32 of(F32 x) {
    const F32 inner = fma(x * x * x, broadcast(0.044715f), x) * 1.595769122f;  // 2 sqrt(2 / pi)
    return x * sigmoid(inner);
  }
};
struct Gelu {
  static F32 of(F32 x) { return x * normal_cdf(x); }
};
struct Relu {
  static F32 of(F32 x) { return x < 0.0f ? F32{} : x; }
};

template <class T, class Act>
void activate_row(const T* x, const T* up, T* out, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += kLanes) {
    const int64_t n = end - i;
    const F32 y = Act::of(load_n(x + i, n));
    store_n(out + i, up == nullptr ? y : rounded_to<T>(y) * load_n(up + i, n), n);
  }
}

template <class T, class Act>
void activate(const ActivationArgs& args) {
  const int64_t chunks = ceil_div(args.width, kTaskElements);
  const bool parallel = args.num_rows * args.width > kTaskElements;
  parallel_for_if(parallel, args.num_rows * chunks, [&](int64_t task) {
    const int64_t row = task / chunks;
    const int64_t begin = task % chunks * kTaskElements;
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    activate_row<T, Act>(x, args.gated ? x + args.width : nullptr, static_cast<T*>(args.out) + row * args.width, begin,
                         min64(args.width, begin + kTaskElements));
  });
}

template <class Act>
void activate_dtype(const ActivationArgs& args) {
  args.dtype == DType::kFloat32 ? activate<float, Act>(args) : activate<bf16, Act>(args);
}

}  // namespace

void activation(const ActivationArgs& args) {
  switch (args.activation) {
    case Activation::kSilu: return activate_dtype<Silu>(args);
    case Activation::kGeluTanh: return activate_dtype<GeluTanh>(args);
    case Activation::kGelu: return activate_dtype<Gelu>(args);
    case Activation::kRelu: return activate_dtype<Relu>(args);
  }
}

}  // namespace shardline::SHARDLINE_ISA
