// The activation functions, and how they gate.
#pragma once

#include "dispatch/kernels.h"
#include "simd/vec_math.h"

namespace shardline::SHARDLINE_ISA {

// Each class replaces some vectors by their activations.
struct Silu {
  template <int kCount>
  static void apply(F32 (&x)[kCount]) {
    F32 factor[kCount];
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) factor[i] = x[i];
    sigmoid(factor);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) x[i] = x[i] * factor[i];
  }
};
struct GeluTanh {
  // (1 + tanh(u)) / 2 is sigmoid(2u), which does not cancel for negative u.
  template <int kCount>
  static void apply(F32 (&x)[kCount]) {
    F32 factor[kCount];
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      factor[i] = fma(x[i] * x[i] * x[i], broadcast(0.044715f), x[i]) * 1.595769122f;  // 2 sqrt(2 / pi)
    }
    sigmoid(factor);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) x[i] = x[i] * factor[i];
  }
};
struct Gelu {
  template <int kCount>
  static void apply(F32 (&x)[kCount]) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) x[i] = x[i] * normal_cdf(x[i]);
  }
};
struct Relu {
  template <int kCount>
  static void apply(F32 (&x)[kCount]) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) x[i] = x[i] < 0.0f ? F32{} : x[i];
  }
};

// max(x, 0)^2
struct Relu2 {
  template <int kCount>
  static void apply(F32 (&x)[kCount]) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) x[i] = x[i] < 0.0f ? F32{} : x[i] * x[i];
  }
};

// gpt-oss: x = min(x, 7), then x * sigmoid(1.702 x). It also changes what it multiplies, see `multiplier`.
struct ClampedSwish {
  template <int kCount>
  static void apply(F32 (&x)[kCount]) {
    F32 factor[kCount];
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      x[i] = x[i] > 7.0f ? broadcast(7.0f) : x[i];
      factor[i] = x[i] * 1.702f;
    }
    sigmoid(factor);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) x[i] = x[i] * factor[i];
  }
};

// What a gate multiplies: up itself, or clamp(up, -7, 7) + 1.
template <class Act>
inline F32 multiplier(Act, F32 up) {
  return up;
}
inline F32 multiplier(ClampedSwish, F32 up) {
  up = up > 7.0f ? broadcast(7.0f) : up;
  up = up < -7.0f ? broadcast(-7.0f) : up;
  return up + 1.0f;
}

// Calls body(Silu()), or body with another of the classes above.
template <class Body>
void with_activation(Activation activation, const Body& body) {
  switch (activation) {
    case Activation::kSilu: return body(Silu());
    case Activation::kGeluTanh: return body(GeluTanh());
    case Activation::kGelu: return body(Gelu());
    case Activation::kRelu: return body(Relu());
    case Activation::kRelu2: return body(Relu2());
    case Activation::kClampedSwish: return body(ClampedSwish());
  }
}

template <class Act>
inline F32 activated(Act, F32 x) {
  F32 one[1] = {x};
  Act::apply(one);
  return one[0];
}

constexpr int64_t kPair = 2 * kLanes;

// out[p] = act(gate[p]) * up[p] for kPair neighbours at each pointer. The activation is rounded to T before the
// product.
template <int kPairs, class Act, class T>
inline void gate_pairs(Act act, const T* const (&gate)[kPairs], const T* const (&up)[kPairs], T* const (&out)[kPairs]) {
  F32 values[2 * kPairs];
#pragma GCC unroll 4
  for (int p = 0; p < kPairs; ++p) {
    values[2 * p] = load(gate[p]);
    values[2 * p + 1] = load(gate[p] + kLanes);
  }
  Act::apply(values);
#pragma GCC unroll 4
  for (int p = 0; p < kPairs; ++p) {
    round_two_to<T>(values[2 * p], values[2 * p + 1]);
    store_two(out[p], values[2 * p] * multiplier(act, load(up[p])),
              values[2 * p + 1] * multiplier(act, load(up[p] + kLanes)));
  }
}

// The same for the first n of kLanes elements.
template <class Act, class T>
inline void gate_n(Act act, F32 gate, F32 up, T* out, int64_t n) {
  store_n(out, rounded_to<T>(activated(act, gate)) * multiplier(act, up), n);
}

}  // namespace shardline::SHARDLINE_ISA
