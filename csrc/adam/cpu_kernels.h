// The functions that each instruction set provides for Adam, as a table.
#pragma once

#include "../shared/convert.h"
#include "math.h"

namespace zpp {

// Gradients are multiplied by `factor` as they are read.
using AdamUpdate = void (*)(const AdamScalars& scalars, float factor, const float* gradients,
                            float* parameters, float* means, float* squares, int64_t size);
// Round both moments stochastically to bf16, with the random words of the elements from `position`.
using RoundMoments = void (*)(const uint32_t* keys, uint32_t position, const float* means,
                              const float* squares, uint16_t* to_means, uint16_t* to_squares,
                              int64_t size);

struct AdamKernels {
    Conversions convert;
    AdamUpdate update;
    RoundMoments round_moments;
};

extern const AdamKernels PLAIN_ADAM, AVX2_ADAM, AVX512_ADAM;

}  // namespace zpp
