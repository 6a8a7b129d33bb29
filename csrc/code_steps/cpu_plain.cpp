// Steps of codes for any processor.

#include "../shared/vector_plain.h"
#include "cpu_loops.h"

const zpp::CodeStepKernels zpp::PLAIN_CODE_STEPS = code_step_kernels<Plain>();
