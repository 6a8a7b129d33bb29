// Adam for x86 with AVX-512 (F, BW, DQ, VL); on other processors this file is empty.

#ifdef __x86_64__

#include "../shared/vector_avx512.h"
#include "cpu_loops.h"

const zpp::AdamKernels zpp::AVX512_ADAM = adam_kernels<Avx512>();

#endif
