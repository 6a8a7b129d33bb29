// The arithmetic of one element of Adam, shared by host and device. zeropp/optim/adam_op.py is the
// same in PyTorch, operation by operation.
//
// Each operation rounds once, half to even, including square root and division. Build with
// contraction off (-ffp-contract=off, nvcc --fmad=false) and without fast-math.
#pragma once

#include <math.h>

#include "../shared/numbers.h"

namespace zpp {

// What all elements of a call share; each was computed in fp64 and rounded once.
struct AdamScalars {
    float keep;              // 1 - lr * weight decay; 1 if the decay is added to the gradient
    float decay;             // the weight decay if it is added to the gradient, else 0
    float mean_rate;         // 1 - beta1
    float square_keep;       // beta2
    float square_rate;       // 1 - beta2
    float root_correction;   // 1 / sqrt(1 - beta2^t)
    float eps;
    float step_size;         // lr / (1 - beta1^t)
    uint32_t keys[2];        // of the random bits that round bf16 moments
};

ZPP_HD float root_of(float value) {
#ifdef __CUDA_ARCH__
    return __fsqrt_rn(value);  // whatever flags nvcc has
#else
    return sqrtf(value);
#endif
}

ZPP_HD float quotient_of(float number, float divisor) {
#ifdef __CUDA_ARCH__
    return __fdiv_rn(number, divisor);
#else
    return number / divisor;
#endif
}

// Update one element. The gradient is already multiplied by the call's factor.
ZPP_HD void adam_update(const AdamScalars& scalars, float gradient, float* parameter, float* mean,
                        float* square) {
    const float before = *parameter * scalars.keep;
    const float decayed = gradient + scalars.decay * before;
    const float g = scalars.decay == 0.0f ? gradient : decayed;  // a weight may be infinite
    const float m = *mean + scalars.mean_rate * (g - *mean);
    const float v = scalars.square_keep * *square + scalars.square_rate * g * g;
    const float divisor = root_of(v) * scalars.root_correction + scalars.eps;
    *mean = m;
    *square = v;
    *parameter = before - scalars.step_size * quotient_of(m, divisor);
}

// 32 random bits for the element at `position` (modulo 2^32) of the call. The multipliers and shifts
// are those of C. Wellons' lowbias32; the second key keeps two streams from being shifts of each
// other.
ZPP_HD uint32_t random_word(const uint32_t* keys, uint32_t position) {
    uint32_t word = position ^ keys[0];
    word = (word ^ word >> 16) * 0x7FEB352Du ^ keys[1];
    word = (word ^ word >> 15) * 0x846CA68Bu;
    return word ^ word >> 16;
}

// Stochastic rounding to bf16 with 16 evenly distributed random bits: up with a probability equal to
// the distance from the lower neighbour. Right on average, where rounding to nearest would lose
// every small update. NaNs that arithmetic produces stay NaNs.
ZPP_HD uint16_t round_stochastically(float value, uint32_t random) {
    return uint16_t((bits_of(value) + (value == value ? random : 0u)) >> 16);
}

}  // namespace zpp
