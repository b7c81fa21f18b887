// Writes new keys, values and latents into the paged cache, in the order of kv_pages.h. Keys and values may be stored
// as signed bytes with one scale per token and head; the bytes of a head depend on that head only. Queries and keys are
// rotated on the way, while they are in L1.
#include "attention/attention_operands.h"
#include "attention/rotate_head.h"
#include "dispatch/variant.h"
#include "runtime/thread_pool.h"
#include "simd/vec_bytes.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int64_t kSmallWork = 1 << 14;

template <class T>
void quantize_head(const T* x, int64_t dim, int8_t* values, float* scale) {
  const ByteScale chosen = byte_scale(largest_magnitude(x, dim));
  const F32 inverse = broadcast(chosen.inverse);
  for (int64_t d = 0; d < dim; d += kLanes) {
    store_bytes(values + d, quantized(load_n(x + d, dim - d), inverse));
  }
  *scale = chosen.scale;
}

template <class T>
void rotate_heads(T* heads, int64_t num_heads, int64_t dim, const float* angles, const Rotation& rotation) {
  for (int64_t h = 0; h < num_heads; ++h) rotate_head(heads + h * dim, angles, rotation);
}

// Stores a head as token `token` of a panel.
template <int kWord, bool kIsKey, class Stored>
void store_head(const Stored* head, int64_t dim, Stored* panel, int64_t token) {
  if constexpr (kIsKey) {
    put_key<kWord>(head, 0, dim, panel, token);
  } else {
    put_value<kWord>(head, dim, panel, token);
  }
}

// `slot` is the token's place among those of its block's first head.
template <bool kIsKey, class T>
void store_heads(const T* heads, int64_t dim, int64_t slot, void* cache, float* scales, int8_t* bytes,
                 const WriteKvArgs& args) {
  constexpr int kWord = kPerWord<typename WordElement<T>::Type>;
  const int64_t token = slot % kPanelTokens;
  for (int64_t head = 0; head < args.num_kv_heads; ++head, heads += dim, slot += args.block_size) {
    const int64_t panel = (slot - token) * dim;
    if (scales != nullptr) {
      quantize_head(heads, dim, bytes, scales + slot);
      store_head<kWord, kIsKey>(bytes, dim, static_cast<int8_t*>(cache) + panel, token);
    } else {
      store_head<kWord, kIsKey>(heads, dim, static_cast<T*>(cache) + panel, token);
    }
  }
}

template <class T>
void write_token(const WriteKvArgs& args, int64_t token) {
  T* key = static_cast<T*>(args.key) + token * args.key_stride;
  if (args.rotation.table != nullptr) {
    const float* angles = angles_of(args.rotation, token);
    T* query = static_cast<T*>(args.query) + token * args.query_stride;
    rotate_heads(query, args.num_heads, args.key_dim, angles, args.rotation);
    rotate_heads(key, args.num_kv_heads, args.key_dim, angles, args.rotation);
  }
  if (args.slots[token] < 0) return;
  const int64_t block = args.slots[token] / args.block_size, offset = args.slots[token] % args.block_size;
  const int64_t slot = block * args.num_kv_heads * args.block_size + offset;
  const T* value = static_cast<const T*>(args.value) + token * args.value_stride;
  int8_t* bytes = nullptr;
  if (args.key_scales != nullptr) {
    const int64_t longest = max64(args.key_dim, args.value_dim) + kLanes;
    bytes = static_cast<int8_t*>(thread_scratch(static_cast<size_t>(longest)));
  }
  store_heads<true>(key, args.key_dim, slot, args.key_cache, args.key_scales, bytes, args);
  store_heads<false>(value, args.value_dim, slot, args.value_cache, args.value_scales, bytes, args);
}

template <class T>
void write_latent_of(const WriteLatentArgs& args, int64_t token) {
  constexpr int kWord = kPerWord<typename WordElement<T>::Type>;
  const int64_t dim = args.latent_dim + args.rope_dim, place = args.slots[token] % kPanelTokens;
  if (args.slots[token] < 0) return;
  T* panel = static_cast<T*>(args.cache) + (args.slots[token] - place) * dim;
  const T* latent = static_cast<const T*>(args.latent) + token * args.latent_stride;
  const T* rope = static_cast<const T*>(args.rope_key) + token * args.rope_stride;
  const int64_t whole = args.latent_dim / kWord * kWord;
  put_key<kWord>(latent, 0, whole, panel, place);
  if (whole == args.latent_dim) return put_key<kWord>(rope, whole, args.rope_dim, panel, place);
  const T joint[2] = {latent[whole], rope[0]};  // a word with an element of both
  put_key<kWord>(joint, whole, kWord, panel, place);
  put_key<kWord>(rope + 1, whole + kWord, args.rope_dim - 1, panel, place);
}

}  // namespace

bool multiplies_pairs() { return kHasBf16Dot; }

void write_kv(const WriteKvArgs& args) {
  const int64_t width = (args.num_heads + args.num_kv_heads) * args.key_dim + args.num_kv_heads * args.value_dim;
  parallel_for_if(args.num_tokens * width > kSmallWork, args.num_tokens, [&](int64_t token) {
    args.dtype == DType::kFloat32 ? write_token<float>(args, token) : write_token<bf16>(args, token);
  });
}

void write_latent(const WriteLatentArgs& args) {
  const int64_t width = args.latent_dim + args.rope_dim;
  parallel_for_if(args.num_tokens * width > kSmallWork, args.num_tokens, [&](int64_t token) {
    args.dtype == DType::kFloat32 ? write_latent_of<float>(args, token) : write_latent_of<bf16>(args, token);
  });
}

}  // namespace shardline::SHARDLINE_ISA
