#include "attention/linear_attention_args.h"
#include "dispatch/variant.h"
#include "runtime/thread_pool.h"
#include "simd/vec_math.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int kVectors = 4;  // of a value head that are computed together
constexpr float kKeyEps = 1e-6f;

inline int64_t padded(int64_t size) { return ceil_div(size, kLanes) * kLanes; }

// log(1 + e) for 0 <= e <= 1, as 2 artanh(e / (2 + e)).
inline F32 log_of_one_plus(F32 e) {
  const F32 s = e / (2.0f + e), square = s * s;
  const F32 series = polynomial(square, broadcast(1.0f / 13), 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3);
  return 2.0f * fma(s * square, series, s);
}

inline F32 softplus(F32 x) { return maximum(x, F32{}) + log_of_one_plus(exp(-absolute(x))); }

inline F32 sigmoid_of(F32 x) {
  F32 one[1] = {x};
  sigmoid(one);
  return one[0];
}

inline float square_sum(const float* x, int64_t size) {
  F32 sum = {};
  for (int64_t i = 0; i < size; i += kLanes) sum = fma(load_n(x + i, size - i), load_n(x + i, size - i), sum);
  return sum_lanes(sum);
}

// The channels of a key head in a token, one part after another: its query, its key, and the values of its value heads.
struct Channels {
  int64_t starts[3], sizes[3], places[3];
  int64_t count;

  Channels(const LinearAttentionArgs& args, int64_t key_head) {
    const int64_t values = args.num_value_heads / args.num_key_heads * args.value_dim;
    const int64_t keys = args.num_key_heads * args.key_dim;
    sizes[0] = sizes[1] = args.key_dim;
    sizes[2] = values;
    starts[0] = key_head * args.key_dim;
    starts[1] = keys + key_head * args.key_dim;
    starts[2] = 2 * keys + key_head * values;
    count = 0;
    for (int part = 0; part < 3; ++part) {
      places[part] = count;
      count += padded(sizes[part]);
    }
  }

  template <class T>
  void read(const T* token, float* to) const {
    for (int part = 0; part < 3; ++part) {
      for (int64_t i = 0; i < sizes[part]; i += kLanes) {
        store(to + places[part] + i, load_n(token + starts[part] + i, sizes[part] - i));
      }
    }
  }

  template <class T>
  void write(const float* from, T* token) const {
    for (int part = 0; part < 3; ++part) {
      for (int64_t i = 0; i < sizes[part]; i += kLanes) {
        store_n(token + starts[part] + i, load(from + places[part] + i), sizes[part] - i);
      }
    }
  }
};

struct Token {
  const float *query, *key;  // [key_dim]; with the delta rule of length 1, the query times key_dim^-1/2

  float decay, beta;
  float skip;  // factor of a value that is added to its output; Mamba-2 only
};

// Updates kNum vectors of the columns of a head's state [key_dim][stride], the last of which has `last` columns, and
// returns the outputs.
template <bool kDelta, int kNum>
inline void advance(float* state, int64_t stride, int64_t last, const Token& token, int64_t key_dim,
                    const float* values, float* outputs) {
  const F32 decay = broadcast(token.decay);
  F32 seen[kNum] = {}, out[kNum] = {};
  for (int64_t i = 0; kDelta && i < key_dim; ++i) {
    const F32 key = broadcast(token.key[i]);
    for (int v = 0; v < kNum; ++v) {
      const float* columns = state + i * stride + v * kLanes;
      seen[v] = fma(kNum == 1 ? load_n(columns, last) : load(columns), key, seen[v]);
    }
  }
  F32 change[kNum];
  for (int v = 0; v < kNum; ++v) {
    const F32 value = kNum == 1 ? load_n(values, last) : load(values + v * kLanes);
    change[v] = (kDelta ? value - decay * seen[v] : value) * token.beta;
    if (!kDelta) out[v] = value * token.skip;
  }
  for (int64_t i = 0; i < key_dim; ++i) {
    const F32 key = broadcast(token.key[i]), query = broadcast(token.query[i]);
    for (int v = 0; v < kNum; ++v) {
      float* columns = state + i * stride + v * kLanes;
      const F32 old = kNum == 1 ? load_n(columns, last) : load(columns);
      const F32 updated = fma(key, change[v], old * decay);
      if (kNum == 1) {
        store_n(columns, updated, last);
      } else {
        store(columns, updated);
      }
      out[v] = fma(query, updated, out[v]);
    }
  }
  for (int v = 0; v < kNum; ++v) store(outputs + v * kLanes, out[v]);
}

// The output of a value head: the norm comes before the gate.
template <class T>
void norm_and_gate(const LinearAttentionArgs& args, const float* head, const T* gate, T* out) {
  const int64_t dim = args.value_dim;
  const float mean = square_sum(head, dim) / static_cast<float>(dim);
  const F32 scale = broadcast(1.0f / __builtin_sqrtf(mean + args.eps));
  for (int64_t i = 0; i < dim; i += kLanes) {
    const F32 weight = load_n(static_cast<const T*>(args.norm) + i, dim - i), z = load_n(gate + i, dim - i);
    store_n(out + i, load(head + i) * scale * weight * (z * sigmoid_of(z)), dim - i);
  }
}

// The outputs of all value heads of a key head, with Mamba-2: the norm is over all of them, behind the gates.
template <class T>
void gate_and_norm(const LinearAttentionArgs& args, float* heads, int64_t size, const T* gate, const T* norm, T* out) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const F32 z = load_n(gate + i, size - i);
    store(heads + i, load(heads + i) * (z * sigmoid_of(z)));
  }
  const float mean = square_sum(heads, size) / static_cast<float>(size);
  const F32 scale = broadcast(1.0f / __builtin_sqrtf(mean + args.eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    store_n(out + i, load(heads + i) * scale * load_n(norm + i, size - i), size - i);
  }
}

// The tokens of a sequence, for a key head and its value heads. Bits depend on the tokens alone: each is computed by
// itself, in their order.
template <class T, bool kDelta>
void run_head(const LinearAttentionArgs& args, int64_t sequence, int64_t key_head) {
  const int64_t first = args.query_starts[sequence], last = args.query_starts[sequence + 1];
  if (first == last) return;
  const Channels channels(args, key_head);
  const int64_t taps = args.num_taps, dim = args.value_dim, key_dim = args.key_dim;
  const int64_t heads = args.num_value_heads / args.num_key_heads, first_head = key_head * heads;
  const int64_t num_channels = 2 * args.num_key_heads * key_dim + args.num_value_heads * dim;
  const int64_t row = args.rows[sequence];
  float* scratch = static_cast<float*>(thread_scratch(
      sizeof(float) * ((2 * taps + 2) * channels.count + padded(heads * dim + kLanes) + 2 * padded(heads))));
  float *weights = scratch, *seen[kMostTaps];
  for (int64_t tap = 0; tap < taps; ++tap) seen[tap] = weights + (taps + tap) * channels.count;
  float *mixed = weights + 2 * taps * channels.count, *bias = mixed + channels.count;
  float *outputs = bias + channels.count, *betas = outputs + padded(heads * dim + kLanes),
        *decays = betas + padded(heads);
  for (int64_t i = 0; i < taps * channels.count; ++i) weights[i] = 0;
  for (int64_t i = 0; i < channels.count; ++i) bias[i] = 0;
  if (args.conv_bias != nullptr) channels.read(args.conv_bias, bias);

  for (int part = 0; part < 3; ++part) {
    for (int64_t c = 0; c < channels.sizes[part]; ++c) {
      for (int64_t tap = 0; tap < taps; ++tap) {
        weights[tap * channels.count + channels.places[part] + c] = args.conv[(channels.starts[part] + c) * taps + tap];
      }
    }
  }
  T* recent = static_cast<T*>(args.recent) + row * (taps - 1) * num_channels;
  float* states = args.state + (row * args.num_value_heads + first_head) * key_dim * dim;
  if (args.context_lens[sequence] == last - first) {  // nothing is before these tokens, and memory holds anything
    for (int64_t tap = 0; tap + 1 < taps; ++tap) __builtin_memset(seen[tap], 0, sizeof(float) * channels.count);
    __builtin_memset(states, 0, sizeof(float) * heads * key_dim * dim);
  } else {
    for (int64_t tap = 0; tap + 1 < taps; ++tap) channels.read(recent + tap * num_channels, seen[tap]);
  }
  for (int64_t t = first; t < last; ++t) {
    channels.read(static_cast<const T*>(args.qkv) + t * args.qkv_stride, seen[taps - 1]);
    for (int64_t c = 0; c < channels.count; c += kLanes) {
      F32 sum = load(bias + c);
      for (int64_t tap = 0; tap < taps; ++tap) {
        sum = fma(load(seen[tap] + c), load(weights + tap * channels.count + c), sum);
      }
      store(mixed + c, sum * sigmoid_of(sum));
    }
    float* oldest = seen[0];
    for (int64_t tap = 0; tap + 1 < taps; ++tap) seen[tap] = seen[tap + 1];
    seen[taps - 1] = oldest;
    float *query = mixed + channels.places[0], *key = mixed + channels.places[1];
    if (kDelta) {
      const float lengths = static_cast<float>(key_dim) * (square_sum(query, key_dim) + kKeyEps);
      const F32 query_scale = broadcast(1.0f / __builtin_sqrtf(lengths));
      const F32 key_scale = broadcast(1.0f / __builtin_sqrtf(square_sum(key, key_dim) + kKeyEps));
      for (int64_t i = 0; i < padded(key_dim); i += kLanes) {
        store(query + i, load(query + i) * query_scale);
        store(key + i, load(key + i) * key_scale);
      }
    }
    const T* beta = kDelta ? static_cast<const T*>(args.beta) + t * args.beta_stride + first_head : nullptr;
    const T* decay = static_cast<const T*>(args.decay) + t * args.decay_stride + first_head;
    for (int64_t h = 0; h < heads; h += kLanes) {
      const F32 offset = load_n(args.decay_offset + first_head + h, heads - h);
      const F32 rate = exp(load_n(args.decay_log + first_head + h, heads - h));
      const F32 step = softplus(load_n(decay + h, heads - h) + offset);
      store(betas + h, kDelta ? sigmoid_of(load_n(beta + h, heads - h)) : step);
      store(decays + h, exp(-(rate * step)));
    }
    for (int64_t h = 0; h < heads; ++h) {
      const Token token = {query, key, decays[h], betas[h], kDelta ? 0.0f : args.skip[first_head + h]};
      float* state = states + h * key_dim * dim;
      const float* values = mixed + channels.places[2] + h * dim;
      int64_t i = 0;
      for (; i + kVectors * kLanes <= dim; i += kVectors * kLanes) {
        advance<kDelta, kVectors>(state + i, dim, kLanes, token, key_dim, values + i, outputs + h * dim + i);
      }
      for (; i < dim; i += kLanes) {  // the next head overwrites what lies behind this one
        advance<kDelta, 1>(state + i, dim, dim - i, token, key_dim, values + i, outputs + h * dim + i);
      }
    }
    const T* gate = static_cast<const T*>(args.gate) + t * args.gate_stride + first_head * dim;
    T* out = static_cast<T*>(args.out) + (t * args.num_value_heads + first_head) * dim;
    if (kDelta) {
      for (int64_t h = 0; h < heads; ++h) norm_and_gate(args, outputs + h * dim, gate + h * dim, out + h * dim);
    } else {
      gate_and_norm(args, outputs, heads * dim, gate, static_cast<const T*>(args.norm) + first_head * dim, out);
    }
  }
  for (int64_t tap = 0; tap + 1 < taps; ++tap) channels.write(seen[tap], recent + tap * num_channels);
}

}  // namespace

void linear_attention(const LinearAttentionArgs& args) {
  const bool is_delta = args.skip == nullptr;
  parallel_for(args.num_sequences * args.num_key_heads, [&](int64_t task) {
    const int64_t sequence = task / args.num_key_heads, key_head = task % args.num_key_heads;
    if (args.dtype == DType::kFloat32) {
      is_delta ? run_head<float, true>(args, sequence, key_head) : run_head<float, false>(args, sequence, key_head);
    } else {
      is_delta ? run_head<bf16, true>(args, sequence, key_head) : run_head<bf16, false>(args, sequence, key_head);
    }
  });
}

}  // namespace shardline::SHARDLINE_ISA
