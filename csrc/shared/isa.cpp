#include "isa.h"

#include <stdint.h>

#include <atomic>

namespace zpp {
namespace {

constexpr int BEST = -1;

std::atomic<int> in_use{BEST};

bool processor_has(int isa) {
#ifdef __x86_64__
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
    const bool has_avx512 =
        has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return isa == AVX512 ? has_avx512 : isa == AVX2 ? has_avx2 : true;
#else
    return isa == PLAIN;
#endif
}

int best_isa() { return processor_has(AVX512) ? AVX512 : processor_has(AVX2) ? AVX2 : PLAIN; }

}  // namespace

Isa isa_in_use() {
    int isa = in_use.load(std::memory_order_relaxed);
    if (isa == BEST) {
        isa = best_isa();
        in_use.store(isa, std::memory_order_relaxed);
    }
    return Isa(isa);
}

}  // namespace zpp

// Use an Isa from now on; -1: the best one. Returns 0, and changes nothing, if the processor lacks it.
extern "C" int64_t zpp_set_isa(int64_t isa) {
    using namespace zpp;
    if (isa != BEST && !processor_has(int(isa))) return 0;
    in_use.store(int(isa));
    return 1;
}
