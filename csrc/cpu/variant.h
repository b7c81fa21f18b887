// The entry points that every ISA's kernel sources define.
#pragma once

#include "kernels.h"

namespace shardline::SHARDLINE_ISA {

void pack_weight(const PackArgs& args);
void linear(const LinearArgs& args);
void rms_norm(const NormArgs& args);
void layer_norm(const NormArgs& args);
void add(const AddArgs& args);
void rope(const RopeArgs& args);
void activation(const ActivationArgs& args);
void paged_attention(const AttentionArgs& args);
void mla_attention(const MlaAttentionArgs& args);
void softcap(float* logits, int64_t count, float cap);
void exp_shifted(const float* logits, int64_t count, float shift, float scale, float* out);
int64_t argmax(const float* logits, int64_t count);
void write_kv(const WriteKvArgs& args);
void quantize_rows(const QuantizeRowsArgs& args);
void pack_int8(const PackQuantizedArgs& args);
void linear_int8(const QuantizedLinearArgs& args);
void pack_int4(const PackQuantizedArgs& args);
void linear_int4(const QuantizedLinearArgs& args);
void combine(const CombineArgs& args);

}  // namespace shardline::SHARDLINE_ISA
