// What zeropp/optim/adam_op.py passes to zpp_adam.
#pragma once

#include "math.h"

namespace zpp {

// A parameter, the tensors that belong to it, and the number of elements of each of them.
struct AdamTensor {
    const uint8_t* gradient;           // of the call's gradient_type
    float *parameter, *mean, *square;  // the moments are of the call's moment_type
    uint8_t* copy;                     // of the call's copy_type; null: no copy is written
    int64_t size;
};

struct AdamCall {
    const AdamTensor* tensors;
    int64_t count, gradient_type, copy_type, moment_type;  // moments: FP32, on CPUs also BF16
    const float* factor;  // multiplies the gradients; on the tensors' device; null: 1
    AdamScalars scalars;
};

}  // namespace zpp
