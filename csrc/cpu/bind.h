#pragma once

#include <nanobind/nanobind.h>

namespace shardline {

void bind_ops(nanobind::module_& m);
void bind_mla(nanobind::module_& m);
void bind_program(nanobind::module_& m);
void bind_quantized(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_shared(nanobind::module_& m);

}  // namespace shardline
