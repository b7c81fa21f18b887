#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "dispatch/dispatch.h"
#include "dispatch/kernels.h"
#include "runtime/pulse.h"
#include "runtime/thread_pool.h"

namespace nb = nanobind;

NB_MODULE(_cpu, m) {
  using namespace nanobind::literals;
  using namespace shardline;
  // A process ends while its programs and groups are alive; that is no leak.
  nb::set_leak_warnings(false);
  m.doc() = "CPU kernels. Use them through shardline.runtime.ops.";
  m.def("isa", [] { return kernels().isa; });
  m.def("available_isas", &available_isas);
  m.def("set_isa", &set_isa, "name"_a);
  m.def("num_threads", &num_threads);
  m.def(
      "set_num_threads",
      [](int count, const std::vector<int>& pin) {
        nb::gil_scoped_release release;
        set_num_threads(count, pin);
      },
      "num_threads"_a, "pin"_a = std::vector<int>());
  m.def("note_work", &note_work);
  m.def("start_pulse", &start_pulse, "fd"_a);
  bind_attention(m);
  bind_experts(m);
  bind_gemm(m);
  bind_grouped(m);
  bind_groups(m);
  bind_kv_cache(m);
  bind_linear_attention(m);
  bind_links(m);
  bind_low_rank(m);
  bind_memory(m);
  bind_mla(m);
  bind_program(m);
  bind_quantized(m);
  bind_rowwise(m);
  bind_sampling(m);
  bind_steps(m);
}
