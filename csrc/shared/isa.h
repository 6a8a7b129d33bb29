// The instruction sets that kernels for CPUs are compiled for, and the one in use.
#pragma once

namespace zpp {

// In the order of ISAS in zeropp/native_library.py.
enum Isa { PLAIN = 0, AVX2 = 1, AVX512 = 2 };

// The best one that this processor has, or the one chosen with zpp_set_isa.
Isa isa_in_use();

}  // namespace zpp
