#include "dispatch/dispatch.h"

#include <atomic>
#include <stdexcept>

// SHARDLINE_NUM_ISAS: how many of the ISAs below there are kernels for, in this order.
#if SHARDLINE_NUM_ISAS > 4
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "dispatch/kernels.h"

namespace shardline {

namespace portable { extern const Kernels kKernels; }
namespace avx2 { extern const Kernels kKernels; }
namespace avx512 { extern const Kernels kKernels; }
namespace avx512_bf16 { extern const Kernels kKernels; }
namespace avx512_amx { extern const Kernels kKernels; }

namespace {

#if SHARDLINE_NUM_ISAS > 4
// Whether this CPU has AMX, and Linux lets this process use it. All threads and forks of the process may use it then.
bool may_use_amx() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr unsigned kAmx = 1u << 22 | 1u << 24 | 1u << 25;    // bf16, tiles, int8; clang does not name them
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kAmx) == kAmx &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

std::vector<const Kernels*> find_available() {
  std::vector<const Kernels*> found = {&portable::kKernels};
#if SHARDLINE_NUM_ISAS > 1
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return found;
  found.push_back(&avx2::kKernels);
#endif
#if SHARDLINE_NUM_ISAS > 2
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return found;
  }
  found.push_back(&avx512::kKernels);
#endif
#if SHARDLINE_NUM_ISAS > 3
  if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni") ||
      !__builtin_cpu_supports("avx512vbmi")) {
    return found;
  }
  found.push_back(&avx512_bf16::kKernels);
#endif
#if SHARDLINE_NUM_ISAS > 4
  if (may_use_amx()) found.push_back(&avx512_amx::kKernels);
#endif
  return found;
}

const std::vector<const Kernels*>& available() {
  static const std::vector<const Kernels*> found = find_available();
  return found;
}

std::atomic<const Kernels*> active{available().back()};

}  // namespace

const Kernels& kernels() { return *active.load(std::memory_order_relaxed); }

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Kernels* candidate : available()) names.emplace_back(candidate->isa);
  return names;
}

void set_isa(const std::string& name) {
  for (const Kernels* candidate : available()) {
    if (name == candidate->isa) {
      active.store(candidate);
      return;
    }
  }
  std::string known;
  for (const std::string& isa : available_isas()) known += (known.empty() ? "" : ", ") + isa;
  throw std::invalid_argument("this CPU has no kernels for '" + name + "'; it has: " + known);
}

}  // namespace shardline
