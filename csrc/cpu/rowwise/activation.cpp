// Activations, alone or as gates: act(gate) * up. They are computed in fp32. A gated bf16 result is rounded after the
// activation and again after the product, as in eager torch. Also rows times a
// factor, and heads times the sigmoid of their gates.
#include "dispatch/variant.h"
#include "rowwise/activations.h"
#include "runtime/thread_pool.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int64_t kTaskElements = 1 << 13;

template <class T, class Act>
void activate_row(Act act, const T* x, T* out, int64_t width) {
  for (int64_t i = 0; i < width; i += kLanes) store_n(out + i, activated(act, load_n(x + i, width - i)), width - i);
}

template <class T, class Act>
void gate_row(Act act, const T* gate, const T* up, T* out, int64_t width) {
  int64_t i = 0;
  for (; i + 2 * kPair <= width; i += 2 * kPair) {
    gate_pairs<2>(act, {gate + i, gate + i + kPair}, {up + i, up + i + kPair}, {out + i, out + i + kPair});
  }
  for (; i < width; i += kLanes) {
    gate_n(act, load_n(gate + i, width - i), load_n(up + i, width - i), out + i, width - i);
  }
}

template <class T, class Act>
void activate(Act act, const ActivationArgs& args) {
  const int64_t chunks = ceil_div(args.width, kTaskElements);
  const bool parallel = args.num_rows * args.width > kTaskElements;
  parallel_for_if(parallel, args.num_rows * chunks, [&](int64_t task) {
    const int64_t row = task / chunks;
    const int64_t begin = task % chunks * kTaskElements;
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride + begin;
    T* out = static_cast<T*>(args.out) + row * args.width + begin;
    const int64_t width = min64(args.width - begin, kTaskElements);
    args.gated ? gate_row(act, x, x + args.width, out, width) : activate_row(act, x, out, width);
  });
}

int64_t factor_of(const ScaleRowsArgs& args, int64_t row) {
  if (args.num_factors == 1) return 0;
  if (args.positions == nullptr) return row;
  return args.positions_are_int64 ? static_cast<const int64_t*>(args.positions)[row]
                                  : static_cast<const int32_t*>(args.positions)[row];
}

template <class T>
void scale(const ScaleRowsArgs& args) {
  const bool parallel = args.num_rows * args.width > kTaskElements;
  parallel_for_if(parallel, args.num_rows, [&](int64_t row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    T* out = static_cast<T*>(args.out) + row * args.out_stride;
    const F32 factor = broadcast(args.factors[factor_of(args, row)]);
    for (int64_t i = 0; i < args.width; i += kLanes) {
      store_n(out + i, load_n(x + i, args.width - i) * factor, args.width - i);
    }
  });
}

template <class T>
void gate_all_heads(const GateHeadsArgs& args) {
  const int64_t width = args.num_heads * args.head_dim;
  parallel_for_if(args.num_tokens * width > kTaskElements, args.num_tokens, [&](int64_t token) {
    for (int64_t head = 0; head < args.num_heads; ++head) {
      T* x = static_cast<T*>(args.x) + token * width + head * args.head_dim;
      const T* gate = static_cast<const T*>(args.gate) + token * args.gate_stride + head * args.gate_head_stride;
      for (int64_t i = 0; i < args.head_dim; i += kLanes) {
        F32 factor[1] = {load_n(gate + i, args.head_dim - i)};
        sigmoid(factor);
        store_n(x + i, load_n(x + i, args.head_dim - i) * rounded_to<T>(factor[0]), args.head_dim - i);
      }
    }
  });
}

}  // namespace

void gate_heads(const GateHeadsArgs& args) {
  args.dtype == DType::kFloat32 ? gate_all_heads<float>(args) : gate_all_heads<bf16>(args);
}

void scale_rows(const ScaleRowsArgs& args) { args.dtype == DType::kFloat32 ? scale<float>(args) : scale<bf16>(args); }

void activation(const ActivationArgs& args) {
  with_activation(args.activation, [&](auto act) {
    args.dtype == DType::kFloat32 ? activate<float>(act, args) : activate<bf16>(act, args);
  });
}

}  // namespace shardline::SHARDLINE_ISA
