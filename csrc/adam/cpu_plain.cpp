// Adam for any processor.

#include "../shared/vector_plain.h"
#include "cpu_loops.h"

const zpp::AdamKernels zpp::PLAIN_ADAM = adam_kernels<Plain>();
