// Adam's loops over arrays. Compilers vectorize them for the instruction set that they compile for,
// and each lane rounds as a single number does. -fno-math-errno is needed: a square root that may
// set errno is not vectorized.
#pragma once

#include "cpu_kernels.h"

namespace zpp {

static void update_loop(const AdamScalars& call_scalars, float factor,
                        const float* __restrict gradients, float* __restrict parameters,
                        float* __restrict means, float* __restrict squares, int64_t size) {
    const AdamScalars scalars = call_scalars;  // a local copy stays in registers: no store aliases it
    for (int64_t i = 0; i < size; ++i) {
        adam_update(scalars, gradients[i] * factor, parameters + i, means + i, squares + i);
    }
}

static void round_moments_loop(const uint32_t* keys, uint32_t position,
                               const float* __restrict means, const float* __restrict squares,
                               uint16_t* __restrict to_means, uint16_t* __restrict to_squares,
                               int64_t size) {
    const uint32_t local_keys[2] = {keys[0], keys[1]};
    for (int64_t i = 0; i < size; ++i, ++position) {
        const uint32_t word = random_word(local_keys, position);
        to_means[i] = round_stochastically(means[i], word & 0xFFFFu);
        to_squares[i] = round_stochastically(squares[i], word >> 16);
    }
}

template <class V> constexpr AdamKernels adam_kernels() {
    return {conversions<V>(), update_loop, round_moments_loop};
}

}  // namespace zpp
