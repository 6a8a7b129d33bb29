// Adam for x86 with AVX2, FMA and F16C; on other processors this file is empty.

#ifdef __x86_64__

#include "../shared/vector_avx2.h"
#include "cpu_loops.h"

const zpp::AdamKernels zpp::AVX2_ADAM = adam_kernels<Avx2>();

#endif
