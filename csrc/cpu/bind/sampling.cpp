#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>

#include "bind/bind.h"
#include "bind/tensor.h"
#include "dispatch/kernels.h"
#include "runtime/program.h"
#include "runtime/thread_pool.h"
#include "sampling/philox.h"
#include "sampling/sampling.h"

namespace shardline {
namespace {

using namespace nanobind::literals;

void check_logits(const Tensor& logits) {
  logits.is(DType::kFloat32).has_shape({-1, -1}).has_rows();
  if (logits.size(1) < 1 || logits.size(1) > INT32_MAX) {
    raise_value_error("logits must have between 1 and 2^31 - 1 columns");
  }
}

// A tensor with one value per row of logits.
template <class T>
T* per_row(nb::handle object, const char* name, DType dtype, const Tensor& logits) {
  return Tensor(object, name).is(dtype).has_shape({logits.size(0)}).is_contiguous().as<T>();
}

void sample(nb::handle logits_object, nb::handle temperature, nb::handle top_k, nb::handle top_p, nb::handle min_p,
            nb::handle seeds, nb::handle choices, nb::handle positions, uint32_t purpose, nb::handle tokens) {
  const Tensor logits(logits_object, "logits");
  check_logits(logits);
  SampleArgs args = {};
  args.logits = logits.as<float>();
  args.logits_stride = logits.row_stride();
  args.num_rows = logits.size(0);
  args.vocab_size = logits.size(1);
  args.temperature = per_row<float>(temperature, "temperature", DType::kFloat32, logits);
  args.top_k = per_row<int32_t>(top_k, "top_k", DType::kInt32, logits);
  args.top_p = per_row<float>(top_p, "top_p", DType::kFloat32, logits);
  args.min_p = per_row<float>(min_p, "min_p", DType::kFloat32, logits);
  args.seeds = per_row<int64_t>(seeds, "seeds", DType::kInt64, logits);
  args.choices = per_row<int64_t>(choices, "choices", DType::kInt64, logits);
  args.positions = per_row<int64_t>(positions, "positions", DType::kInt64, logits);
  args.purpose = purpose;
  args.tokens = per_row<int64_t>(tokens, "tokens", DType::kInt64, logits);
  nb::gil_scoped_release release;
  sample(args);
}

void check_penalty_entries(const PenaltyArgs& args, int64_t num_entries) {
  bool valid = args.offsets[0] == 0 && args.offsets[args.num_rows] == num_entries;
  for (int64_t r = 0; r < args.num_rows; ++r) valid = valid && args.offsets[r] <= args.offsets[r + 1];
  if (!valid) raise_value_error("offsets must rise from 0 to the number of entries");
  for (int64_t i = 0; i < num_entries; ++i) {
    if (args.ids[i] < 0 || args.ids[i] >= args.vocab_size) {
      raise_value_error("token id " + std::to_string(args.ids[i]) + " is outside the vocabulary");
    }
  }
}

void penalize(nb::handle logits_object, nb::handle repetition, nb::handle presence, nb::handle frequency,
              nb::handle offsets_object, nb::handle ids_object, nb::handle output_counts_object,
              nb::handle in_prompt_object, nb::handle bias_object) {
  const Tensor logits(logits_object, "logits"), offsets(offsets_object, "offsets"), ids(ids_object, "ids");
  check_logits(logits);
  ids.is(DType::kInt32).has_shape({-1}).is_contiguous();
  PenaltyArgs args = {};
  args.logits = logits.as<float>();
  args.logits_stride = logits.row_stride();
  args.num_rows = logits.size(0);
  args.vocab_size = logits.size(1);
  const auto per_entry = [&](nb::handle object, const char* name, DType dtype) {
    return Tensor(object, name).is(dtype).has_shape({ids.size(0)}).is_contiguous();
  };
  args.offsets = offsets.is(DType::kInt32).has_shape({logits.size(0) + 1}).is_contiguous().as<int32_t>();
  args.ids = ids.as<int32_t>();
  args.output_counts = per_entry(output_counts_object, "output_counts", DType::kInt32).as<int32_t>();
  args.in_prompt = per_entry(in_prompt_object, "in_prompt", DType::kUInt8).as<uint8_t>();
  args.bias = per_entry(bias_object, "bias", DType::kFloat32).as<float>();
  args.repetition = per_row<float>(repetition, "repetition", DType::kFloat32, logits);
  args.presence = per_row<float>(presence, "presence", DType::kFloat32, logits);
  args.frequency = per_row<float>(frequency, "frequency", DType::kFloat32, logits);
  check_penalty_entries(args, ids.size(0));
  nb::gil_scoped_release release;
  penalize(args);
}

void logprobs(nb::handle logits_object, nb::handle chosen_object, int64_t top_n, nb::handle chosen_logprobs,
              nb::handle chosen_ranks, nb::handle top_ids_object, nb::handle top_logprobs_object) {
  const Tensor logits(logits_object, "logits");
  const Tensor top_ids(top_ids_object, "top_ids"), top_logprobs(top_logprobs_object, "top_logprobs");
  check_logits(logits);
  LogprobArgs args = {};
  args.logits = logits.as<float>();
  args.logits_stride = logits.row_stride();
  args.num_rows = logits.size(0);
  args.vocab_size = logits.size(1);
  args.chosen = per_row<int64_t>(chosen_object, "chosen", DType::kInt64, logits);
  args.top_n = top_n;
  args.chosen_logprobs = per_row<float>(chosen_logprobs, "chosen_logprobs", DType::kFloat32, logits);
  args.chosen_ranks = per_row<int64_t>(chosen_ranks, "chosen_ranks", DType::kInt64, logits);
  args.top_ids = top_ids.is(DType::kInt64).has_shape({logits.size(0), top_n}).is_contiguous().as<int64_t>();
  args.top_logprobs = top_logprobs.is(DType::kFloat32).has_shape({logits.size(0), top_n}).is_contiguous().as<float>();
  for (int64_t r = 0; r < args.num_rows; ++r) {
    if (args.chosen[r] < 0 || args.chosen[r] >= args.vocab_size) {
      raise_value_error("a chosen id is outside the vocabulary");
    }
  }
  nb::gil_scoped_release release;
  logprobs(args);
}

void mask_tokens(nb::handle logits_object, nb::handle rows_object, nb::handle bits_object) {
  const Tensor logits(logits_object, "logits"), rows(rows_object, "rows"), bits(bits_object, "bits");
  check_logits(logits);
  rows.is(DType::kInt64).has_shape({-1}).is_contiguous();
  bits.is(DType::kInt32).has_shape({rows.size(0), (logits.size(1) + 31) / 32}).has_rows();
  const int64_t* indices = rows.as<int64_t>();
  for (int64_t i = 0; i < rows.size(0); ++i) {
    if (indices[i] < 0 || indices[i] >= logits.size(0)) raise_value_error("rows names a row that logits do not have");
  }
  nb::gil_scoped_release release;
  parallel_for(rows.size(0), [&](int64_t i) {
    kernels().mask_logits(logits.as<float>() + indices[i] * logits.row_stride(), logits.size(1),
                          bits.as<uint32_t>() + i * bits.row_stride());
  });
}

void softcap(nb::handle logits_object, float cap) {
  const Tensor logits(logits_object, "logits");
  logits.is(DType::kFloat32).is_contiguous();
  perform([data = logits.as<float>(), count = logits.num_elements(), cap] { kernels().softcap(data, count, cap); });
}

void greedy_argmax(nb::handle logits_object, nb::handle ids_object, nb::handle values_object) {
  const Tensor logits(logits_object, "logits");
  check_logits(logits);
  int64_t* ids = per_row<int64_t>(ids_object, "ids", DType::kInt64, logits);
  float* values = per_row<float>(values_object, "values", DType::kFloat32, logits);
  nb::gil_scoped_release release;
  parallel_for(logits.size(0), [&](int64_t row) {
    const float* row_logits = logits.as<float>() + row * logits.row_stride();
    ids[row] = kernels().argmax(row_logits, logits.size(1));
    values[row] = row_logits[ids[row]];
  });
}

void row_digests(nb::handle logits_object, nb::handle digests_object) {
  const Tensor logits(logits_object, "logits");
  check_logits(logits);
  int64_t* digests = per_row<int64_t>(digests_object, "digests", DType::kInt64, logits);
  nb::gil_scoped_release release;
  parallel_for(logits.size(0), [&](int64_t row) {
    const float* row_logits = logits.as<float>() + row * logits.row_stride();
    digests[row] = static_cast<int64_t>(kernels().hash_row(row_logits, logits.size(1)));
  });
}

// best [M, 2, num_panels]: values, then ids as int32; pairs [M, 2]: the largest value of the row, and its id.
void choose_best(nb::handle best_object, nb::handle pairs_object) {
  const Tensor best(best_object, "best"), pairs(pairs_object, "pairs");
  best.is(DType::kFloat32).has_shape({-1, 2, -1}).is_contiguous();
  pairs.is(DType::kFloat32).has_shape({best.size(0), 2}).is_contiguous();
  if (best.size(2) < 1) raise_value_error("best must have at least one column");
  const int64_t num_rows = best.size(0), count = best.size(2);
  const float* rows = best.as<float>();
  float* chosen = pairs.as<float>();
  perform([=] {
    for (int64_t row = 0; row < num_rows; ++row) {
      const float* values = rows + row * 2 * count;
      const int64_t place = kernels().argmax(values, count);
      std::memcpy(chosen + 2 * row, values + place, sizeof(float));
      std::memcpy(chosen + 2 * row + 1, values + count + place, sizeof(float));
    }
  });
}

using Words4 = std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>;

Words4 philox(Words4 counter, std::tuple<uint32_t, uint32_t> key) {
  const auto [c0, c1, c2, c3] = counter;
  const auto [k0, k1] = key;
  const auto words = philox4x32({c0, c1, c2, c3}, {k0, k1});
  return {words[0], words[1], words[2], words[3]};
}

}  // namespace

void bind_sampling(nb::module_& m) {
  m.def("sample",
        static_cast<void (*)(nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle,
                             nb::handle, uint32_t, nb::handle)>(&sample),
        "logits"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "seeds"_a, "choices"_a, "positions"_a,
        "purpose"_a, "tokens"_a);
  m.def("penalize",
        static_cast<void (*)(nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle,
                             nb::handle, nb::handle)>(&penalize),
        "logits"_a, "repetition"_a, "presence"_a, "frequency"_a, "offsets"_a, "ids"_a, "output_counts"_a, "in_prompt"_a,
        "bias"_a);
  m.def(
      "logprobs",
      static_cast<void (*)(nb::handle, nb::handle, int64_t, nb::handle, nb::handle, nb::handle, nb::handle)>(&logprobs),
      "logits"_a, "chosen"_a, "top_n"_a, "chosen_logprobs"_a, "chosen_ranks"_a, "top_ids"_a, "top_logprobs"_a);
  m.def("mask_tokens", &mask_tokens, "logits"_a, "rows"_a, "bits"_a);
  m.def("row_digests", &row_digests, "logits"_a, "digests"_a);
  m.def("softcap", &softcap, "logits"_a, "cap"_a);
  m.def("choose_best", &choose_best, "best"_a, "pairs"_a);
  m.def("greedy_argmax", &greedy_argmax, "logits"_a, "ids"_a, "values"_a);
  m.def("philox4x32", &philox, "counter"_a, "key"_a);
  m.def("uniform", &uniform, "seed"_a, "choice"_a, "position"_a, "purpose"_a);
}

}  // namespace shardline
