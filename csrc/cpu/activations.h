// The activations themselves, lane by lane.
#pragma once

#include "kernels.h"
#include "vec_math.h"

namespace shardline::SHARDLINE_ISA {

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

// Calls body(Silu()), or whichever it is.
template <class Body>
void with_activation(Activation activation, const Body& body) {
  switch (activation) {
    case Activation::kSilu: return body(Silu());
    case Activation::kGeluTanh: return body(GeluTanh());
    case Activation::kGelu: return body(Gelu());
    case Activation::kRelu: return body(Relu());
  }
}

// out = act(gate) * up for 2 * kLanes values of dtype T, rounded to it after the activation and after the product.
template <class Act, class T>
inline void gate_two(Act, F32 gate, F32 more_gate, F32 up, F32 more_up, T* out) {
  F32 first = Act::of(gate), second = Act::of(more_gate);
  round_two_to<T>(first, second);
  store_two(out, first * up, second * more_up);
}

// The same for the first n of kLanes.
template <class Act, class T>
inline void gate_n(Act, F32 gate, F32 up, T* out, int64_t n) {
  store_n(out, rounded_to<T>(Act::of(gate)) * up, n);
}

}  // namespace shardline::SHARDLINE_ISA
