// Writes new keys, values and latents into the paged cache, in the order of kv_pages.h. They may be stored as bytes,
// with one scale per token and head; the bytes of a head depend on that head only. Queries and keys are rotated on the
// way, while they are in L1.
#include "attention/attention_operands.h"
#include "attention/rotate_head.h"
#include "dispatch/variant.h"
#include "runtime/thread_pool.h"
#include "simd/vec_fp8.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int64_t kSmallWork = 1 << 14;

// Bytes of a head, as many as fill vectors, in this thread's memory; the scale goes to *scale.
template <class T>
int8_t* quantize_head(const T* x, int64_t dim, DType stored, float* scale) {
  auto* bytes = static_cast<int8_t*>(thread_scratch(static_cast<size_t>(dim + kLanes)));
  const bool is_e4m3 = stored == DType::kFloat8E4m3;
  const ByteScale chosen = byte_scale(largest_magnitude(x, dim), is_e4m3 ? kLargestE4m3 : kLargestInt8);
  const F32 inverse = broadcast(chosen.inverse);
  for (int64_t d = 0; d < dim; d += kLanes) {
    const F32 values = load_n(x + d, dim - d);
    store_bytes(bytes + d, is_e4m3 ? as_e4m3(scaled(values, inverse)) : quantized(values, inverse));
  }
  *scale = chosen.scale;
  return bytes;
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
void store_heads(const T* heads, int64_t dim, int64_t slot, void* cache, float* scales, const WriteKvArgs& args) {
  constexpr int kWord = kPerWord<typename WordElement<T>::Type>;
  const int64_t token = slot % kPanelTokens;
  for (int64_t head = 0; head < args.num_kv_heads; ++head, heads += dim, slot += args.block_size) {
    const int64_t panel = (slot - token) * dim;
    if (scales != nullptr) {
      const int8_t* bytes = quantize_head(heads, dim, args.stored, scales + slot);
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
  store_heads<true>(key, args.key_dim, slot, args.key_cache, args.key_scales, args);
  store_heads<false>(value, args.value_dim, slot, args.value_cache, args.value_scales, args);
}

// The latent as bytes with a scale, and the rotated part in bf16.
template <class T>
void write_latent_bytes(const WriteLatentArgs& args, const T* latent, const T* rope, int64_t slot) {
  constexpr int kWord = kPerWord<typename WordElement<T>::Type>;
  const int64_t place = slot % kPanelTokens, first = slot - place;
  const int8_t* bytes = quantize_head(latent, args.latent_dim, args.stored, args.scales + slot);
  put_key<kWord>(bytes, 0, args.latent_dim, static_cast<int8_t*>(args.cache) + first * args.latent_dim, place);
  auto* rounded = static_cast<bf16*>(thread_scratch(static_cast<size_t>(args.rope_dim + kLanes) * sizeof(bf16)));
  for (int64_t d = 0; d < args.rope_dim; d += kLanes) store(rounded + d, load_n(rope + d, args.rope_dim - d));
  put_key<kWord>(rounded, 0, args.rope_dim, args.rope_cache + first * args.rope_dim, place);
}

template <class T>
void write_latent_of(const WriteLatentArgs& args, int64_t token) {
  constexpr int kWord = kPerWord<typename WordElement<T>::Type>;
  const int64_t dim = args.latent_dim + args.rope_dim, place = args.slots[token] % kPanelTokens;
  if (args.slots[token] < 0) return;
  const T* latent = static_cast<const T*>(args.latent) + token * args.latent_stride;
  const T* rope = static_cast<const T*>(args.rope_key) + token * args.rope_stride;
  if (args.scales != nullptr) return write_latent_bytes(args, latent, rope, args.slots[token]);
  T* panel = static_cast<T*>(args.cache) + (args.slots[token] - place) * dim;
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
