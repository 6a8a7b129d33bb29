// The functions that each instruction set provides for steps of codes, as a table.
#pragma once

#include "../shared/convert.h"
#include "message.h"

namespace zpp {

// One tile of one segment: its elements, the codes and scales that are held, the steps and scales to
// send. Adds to `counts`.
using FindSteps = void (*)(const void* values, const uint8_t* codes, const uint8_t* scales,
                           uint8_t* steps, uint8_t* new_scales, int64_t size, int32_t* counts);
// Moves the codes of a tile, and replaces its scales.
using ApplySteps = void (*)(const uint8_t* steps, const uint8_t* new_scales, int8_t* codes,
                            uint8_t* scales, int64_t size);

struct CodeStepKernels {
    Conversions convert;
    FindSteps find[NUM_TYPES][3];  // by reach: 1, 2, 4
    ApplySteps apply[3];
};

extern const CodeStepKernels PLAIN_CODE_STEPS, AVX2_CODE_STEPS, AVX512_CODE_STEPS;

}  // namespace zpp
