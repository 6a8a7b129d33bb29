// The arithmetic of one element of Adam, once for every processor: zeropp/optim/adam_op.py has the
// same in PyTorch, operation by operation.
//
// Each operation rounds once, half to even, square root and division too; build with contraction
// off (-ffp-contract=off, nvcc --fmad=false) and without fast-math.
#pragma once

#include <math.h>

#include "quant_math.h"

namespace zpp {

// What all elements of a call share, each computed in fp64 and rounded once.
struct AdamScalars {
    float keep;              // 1 - lr * weight decay; 1 where the decay is in the gradient
    float decay;             // the weight decay where it is in the gradient, else 0
    float mean_rate;         // 1 - beta1
    float square_keep;       // beta2
    float square_rate;       // 1 - beta2
    float root_correction;   // 1 / sqrt(1 - beta2^t)
    float eps;
    float step_size;         // lr / (1 - beta1^t)
    uint32_t keys[2];        // of the random bits that round 16-bit moments
};

ZPP_HD bool is_finite(float value) { return (bits_of(value) & INFINITY_BITS) != INFINITY_BITS; }

ZPP_HD float root_of(float value) {
#ifdef __CUDA_ARCH__
    return __fsqrt_rn(value);  // whatever nvcc is told
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

// The gradient is times `factor` already.
ZPP_HD void adam_update(const AdamScalars& with, float gradient, float* parameter, float* mean,
                        float* square) {
    const float before = *parameter * with.keep;
    const float decayed = gradient + with.decay * before;
    const float pull = with.decay == 0.0f ? gradient : decayed;  // a weight may be infinite
    const float m = *mean + with.mean_rate * (pull - *mean);
    const float v = with.square_keep * *square + with.square_rate * pull * pull;
    const float divisor = root_of(v) * with.root_correction + with.eps;
    *mean = m;
    *square = v;
    *parameter = before - with.step_size * quotient_of(m, divisor);
}

// 32 random bits for the element at `place`, which counts modulo 2^32. The multipliers and shifts are
// those of C. Wellons' lowbias32; the second key keeps two streams from being shifts of each other.
ZPP_HD uint32_t random_word(const uint32_t* keys, uint32_t place) {
    uint32_t word = place ^ keys[0];
    word = (word ^ word >> 16) * 0x7FEB352Du ^ keys[1];
    word = (word ^ word >> 15) * 0x846CA68Bu;
    return word ^ word >> 16;
}

// Of the two neighbours in bf16 the upper one as often as `value` is near it, if `random`, 16 bits,
// is evenly spread: right on average, where a small update would be rounded away each time. A NaN
// that came of arithmetic stays one.
ZPP_HD uint16_t drawn_bf16(float value, uint32_t random) {
    return uint16_t((bits_of(value) + (value == value ? random : 0u)) >> 16);
}

}  // namespace zpp
