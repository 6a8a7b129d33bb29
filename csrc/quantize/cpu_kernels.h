// The functions that each instruction set provides for quantization, as a table. They work on tiles:
// pieces of one segment that start at the beginning of a block.
#pragma once

#include "../shared/convert.h"
#include "math.h"

namespace zpp {

constexpr int64_t TILE = 2048;  // elements; a multiple of every block
constexpr int64_t CHUNK = 128;  // elements; divides every block but that of INT3
constexpr int MAX_TERMS = 8;    // of one call of a sum

// Where a tile's codes and scales are.
struct Coded {
    const uint8_t* codes;
    const uint8_t* scales;
};

// For each chunk of a tile, the `high` and `low` that extreme_bits takes.
struct Extremes {
    uint32_t high[TILE / CHUNK], low[TILE / CHUNK];
};

using Quantize = void (*)(const void* values, uint8_t* codes, uint8_t* scales, int64_t size);
// Quantize a tile of INT8 by the scales that are held, where they fit: see scale_after.
using Requantize = void (*)(const void* values, const uint8_t* held_scales, uint8_t* codes,
                            uint8_t* scales, int64_t size);
using Dequantize = void (*)(Coded from, void* values, int64_t size);
// sums = 0 if `fresh`; then add the terms one after another, at most MAX_TERMS of them: what codes
// stand for, rotated or not. If `extremes` is not null, fill it with those of the sums, not for codes
// of odd numbers: what a unit has beyond a segment's end does not count as 0 there.
using Sum = void (*)(const Coded* terms, int count, bool fresh, float* sums, int64_t size,
                     Extremes* extremes);
// Of sums that are rotated if codes are to stand for rotated values. `extremes` may be null.
using QuantizeSum = void (*)(const float* sums, const Extremes* extremes, uint8_t* codes,
                             uint8_t* scales, int64_t size);
using SumRaw = void (*)(const void* values, float* sums, int64_t size);
// Turns sums of rotated values into sums of values.
using Unrotate = void (*)(float* sums, int64_t size);

struct WidthKernels {
    Quantize quantize[NUM_TYPES];
    Dequantize dequantize[NUM_TYPES];
    Sum sum;
    QuantizeSum quantize_sum;
};

struct QuantizeKernels {
    WidthKernels of[NUM_WIDTHS];
    Requantize requantize[NUM_TYPES];
    Conversions convert;
    SumRaw sum_raw[NUM_TYPES];
    Unrotate unrotate;
};

extern const QuantizeKernels PLAIN_QUANTIZE, AVX2_QUANTIZE, AVX512_QUANTIZE;

}  // namespace zpp
