// The kernels that exist once per ISA: their arguments, and the table through which the rest calls them.
//
// "Rows" are row-major with contiguous elements in a row; a stride counts elements between rows.
#pragma once

#include "types.h"

namespace shardline {

constexpr int64_t kPanelColumns = 64;
// A gated GEMM writes act(gate) * up, rounded once: in each panel 32 columns of the gate's weight, then the same 32 of
// up's. num_columns counts what is written.
constexpr int64_t kGatedColumns = kPanelColumns / 2;

enum class Activation : uint8_t { kSilu, kGeluTanh, kGelu, kRelu };

// Where the columns of a weight go in panels that it may share with others: of every panel's columns, those
// [begin, begin + width) are filled one after another, from the `first` of them on. What is behind the weight's last
// column in its panel becomes zero, for the next weight to overwrite: so weights are packed in their order.
struct PanelColumns {
  int64_t first, begin, width;

  int64_t first_panel() const { return first / width; }
  int64_t end_panel(int64_t num_columns) const { return (first + num_columns + width - 1) / width; }
};

// weight [N, K] becomes panels of 64 columns: [panel][k][column], or for bf16 [panel][k / 2][column][k % 2]; padded
// with zeros to whole panels and whole pairs.
struct PackArgs {
  DType dtype;
  const void* weight;
  int64_t weight_stride;
  void* panels;
  int64_t num_columns, depth;
  PanelColumns place;
};

struct LinearArgs {
  DType dtype, out_dtype, bias_dtype;
  const void* x;
  int64_t x_stride;
  const void* panels;
  const void* bias;  // null for none; the gate's, then up's
  void* out;
  int64_t out_stride;
  int64_t num_rows, num_columns, depth;
  bool gated;
  Activation activation;  // of the gate
  bool best;              // out [num_rows][2][num_panels]: each panel's largest output; its column, as int32
};

// Bytes of k that one column contributes to a step of the quantized GEMMs, and weights that share a scale in int4.
constexpr int64_t kQuad = 4, kGroupDepth = 32;
// A group of a panel in int4: halves of bytes, then a byte per column as scale.
constexpr int64_t kInt4GroupBytes = kGroupDepth * kPanelColumns / 2 + kPanelColumns;

struct QuantizeRowsArgs {
  DType dtype;
  const void* x;
  int64_t x_stride;
  int8_t* values;  // [num_rows, depth padded with zeros to whole groups]
  float* scales;   // [num_rows]
  int32_t* sums;   // [num_rows, 1 + number of groups]: of the row's values, then of each group's
  int64_t num_rows, depth;
};

// weight [N, K] becomes panels of 64 columns, and a scale per column: in int8 [panel][k / 4][column][k % 4] with 128
// added; in int4 [panel][k / 32], each kInt4GroupBytes.
struct PackQuantizedArgs {
  DType dtype;
  const void* weight;
  int64_t weight_stride;
  uint8_t* panels;
  float* scales;  // [N padded to whole panels]
  int64_t num_columns, depth;
  PanelColumns place;
};

struct QuantizedLinearArgs {
  DType out_dtype, bias_dtype;
  const int8_t* x;  // as in QuantizeRowsArgs
  const float* row_scales;
  const int32_t* row_sums;
  const uint8_t* panels;
  const float* column_scales;
  const void* bias;  // null for none; the gate's, then up's
  void* out;
  int64_t out_stride;
  int64_t num_rows, num_columns, depth;
  bool gated;
  Activation activation;  // of the gate
  bool best;              // int8 only, see LinearArgs
};

struct NormArgs {
  DType dtype;
  const void* x;  // rows of a token lie together, tokens x_stride apart
  int64_t x_stride, rows_per_token;
  const void* residual;  // null: normalise x alone
  int64_t residual_stride;
  void* summed;        // x + residual, contiguous
  const void* weight;  // [width]
  const void* bias;    // [width] or null; layer_norm only
  void* out;           // contiguous, or null: rows are quantized instead, see QuantizeRowsArgs
  int8_t* values;
  float* scales;
  int32_t* sums;
  int64_t num_rows, width;
  float eps;
  float weight_offset;  // rms_norm only
};

struct AddArgs {
  DType dtype;
  const void *x, *y;
  void* out;
  int64_t count;
};

// By which angles tokens are rotated, see rotate_head.h.
struct Rotation {
  const void* positions;  // [num_tokens]
  bool positions_are_int64;
  const float* table;  // [max_positions, 2 * half]: cosines, then sines
  int64_t half;
  bool interleaved;
};

struct RopeArgs {
  DType dtype;
  void* x;  // [num_tokens, num_heads, at least 2 * half], in place
  int64_t x_stride, head_stride;
  Rotation rotation;
  int64_t num_tokens, num_heads;
};

struct ActivationArgs {
  DType dtype;
  Activation activation;
  const void* x;  // [num_rows, width], or [num_rows, 2 * width] if gated
  int64_t x_stride;
  void* out;  // [num_rows, width], contiguous
  int64_t num_rows, width;
  bool gated;
};

struct AttentionArgs {
  DType dtype;
  const void* query;  // [num_tokens, num_heads, key_dim]
  int64_t query_stride;
  const void* key_cache;    // [num_blocks, num_kv_heads, block_size, key_dim]
  const void* value_cache;  // [num_blocks, num_kv_heads, block_size, value_dim]
  const int32_t* block_tables;
  int64_t block_table_stride;
  const int32_t* query_starts;  // [num_sequences + 1]
  const int32_t* context_lens;  // [num_sequences]
  void* out;                    // [num_tokens, num_heads, value_dim], contiguous
  int64_t num_sequences, num_heads, num_kv_heads, key_dim, value_dim, block_size;
  int64_t window;  // 0 for none
  float scale;
  float softcap;  // 0 for none
  // [num_blocks, num_kv_heads, block_size], and the caches are int8; null: the caches are in dtype
  const float *key_scales, *value_scales;
};

// New keys and values into the cache. With a rotation queries and keys are rotated first, where they are.
struct WriteKvArgs {
  DType dtype;
  Rotation rotation;  // of no table: nothing is rotated, and there is no query
  void* query;        // [num_tokens, num_heads, key_dim]
  void* key;          // [num_tokens, num_kv_heads, key_dim]
  const void* value;  // [num_tokens, num_kv_heads, value_dim]
  int64_t query_stride, key_stride, value_stride;
  void *key_cache, *value_cache;  // [num_blocks, num_kv_heads, block_size, key_dim or value_dim]
  // [num_blocks, num_kv_heads, block_size], and the caches are int8: value = scale * byte; null: they are in dtype
  float *key_scales, *value_scales;
  const int64_t* slots;  // [num_tokens]; negative: not stored
  int64_t num_tokens, num_heads, num_kv_heads, key_dim, value_dim, block_size;
};

struct MlaAttentionArgs {
  DType dtype;
  const void* query_latent;  // [num_tokens, num_heads, latent_dim], contiguous in a token
  int64_t query_latent_stride;
  const void* query_rope;  // [num_tokens, num_heads, rope_dim]
  int64_t query_rope_stride, query_rope_head_stride;
  const void* cache;  // [num_blocks, block_size, latent_dim + rope_dim]
  const int32_t* block_tables;
  int64_t block_table_stride;
  const int32_t* query_starts;  // [num_sequences + 1]
  const int32_t* context_lens;  // [num_sequences]
  void* out;                    // [num_tokens, num_heads, latent_dim], contiguous
  int64_t num_sequences, num_heads, latent_dim, rope_dim, block_size;
  float scale;
};

// out[t] = sum over slots of weights[t][slot] * rows[places[t][slot]], then + shared_scale[t] * shared[t].
struct CombineArgs {
  DType rows_dtype, shared_dtype, out_dtype;
  const void* rows;       // [.., width], contiguous
  const int32_t* places;  // [num_tokens, num_slots]; negative: the slot counts nothing
  const float* weights;   // [num_tokens, num_slots]
  const void* shared;     // [num_tokens, width] or null
  int64_t shared_stride;
  const float* shared_scale;  // [num_tokens], or null for one
  void* out;                  // [num_tokens, width]
  int64_t out_stride, num_tokens, num_slots, width;
};

struct Kernels {
  const char* isa;
  void (*pack_weight)(const PackArgs&);
  void (*linear)(const LinearArgs&);
  void (*rms_norm)(const NormArgs&);
  void (*layer_norm)(const NormArgs&);
  void (*add)(const AddArgs&);
  void (*rope)(const RopeArgs&);
  void (*activation)(const ActivationArgs&);
  void (*paged_attention)(const AttentionArgs&);
  void (*mla_attention)(const MlaAttentionArgs&);
  void (*softcap)(float* logits, int64_t count, float cap);
  // out[i] = exp((logits[i] - shift) * scale), and 0 for NaN; out may be logits.
  void (*exp_shifted)(const float* logits, int64_t count, float shift, float scale, float* out);
  // The largest logit, and the lowest index that has it; NaN never wins.
  int64_t (*argmax)(const float* logits, int64_t count);
  void (*write_kv)(const WriteKvArgs&);
  void (*quantize_rows)(const QuantizeRowsArgs&);
  void (*pack_int8)(const PackQuantizedArgs&);
  void (*linear_int8)(const QuantizedLinearArgs&);
  void (*pack_int4)(const PackQuantizedArgs&);
  void (*linear_int4)(const QuantizedLinearArgs&);
  void (*combine)(const CombineArgs&);
};

const Kernels& kernels();

}  // namespace shardline
