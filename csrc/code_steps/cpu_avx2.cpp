// Steps of codes for x86 with AVX2, FMA and F16C; on other processors this file is empty.

#ifdef __x86_64__

#include "../shared/vector_avx2.h"
#include "cpu_loops.h"

const zpp::CodeStepKernels zpp::AVX2_CODE_STEPS = code_step_kernels<Avx2>();

#endif
