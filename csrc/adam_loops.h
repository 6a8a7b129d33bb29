// The loops of Adam over a piece of its arrays, for any processor: the compiler makes vectors of them,
// of the instruction set that it compiles for, and each of their lanes rounds as one number does.
//
// That takes -fno-math-errno: a root that may set errno is no vector's.
#pragma once

#include "kernels.h"

namespace zpp {

static void adam_loop(const AdamScalars& with, float factor, const float* __restrict gradients,
                      float* __restrict parameters, float* __restrict means,
                      float* __restrict squares, int64_t size) {
    const AdamScalars scalars = with;  // in registers: no store can change them
    for (int64_t i = 0; i < size; ++i) {
        adam_update(scalars, gradients[i] * factor, parameters + i, means + i, squares + i);
    }
}

static void draw_loop(const uint32_t* keys, uint32_t place, const float* __restrict means,
                      const float* __restrict squares, uint16_t* __restrict to_means,
                      uint16_t* __restrict to_squares, int64_t size) {
    const uint32_t own[2] = {keys[0], keys[1]};
    for (int64_t i = 0; i < size; ++i, ++place) {
        const uint32_t word = random_word(own, place);
        to_means[i] = drawn_bf16(means[i], word & 0xFFFFu);
        to_squares[i] = drawn_bf16(squares[i], word >> 16);
    }
}

}  // namespace zpp
