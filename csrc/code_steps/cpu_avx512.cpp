// Steps of codes for x86 with AVX-512 (F, BW, DQ, VL); on other processors this file is empty.

#ifdef __x86_64__

#include "../shared/vector_avx512.h"
#include "cpu_loops.h"

const zpp::CodeStepKernels zpp::AVX512_CODE_STEPS = code_step_kernels<Avx512>();

#endif
