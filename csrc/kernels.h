// The functions that each instruction set provides, as a table; a tile is a piece of one segment
// that starts at a block.
#pragma once

#include "format.h"

namespace zpp {

constexpr int64_t TILE = 2048;  // elements; a multiple of every block
constexpr int64_t CHUNK = 128;  // elements; divides every block
constexpr int MAX_TERMS = 8;    // of one call of a sum

// Where a tile's codes and scales are.
struct Coded {
    const uint8_t* codes;
    const uint8_t* scales;
};

// What a chunk's scale needs to know (extreme_bits), for each chunk of a tile.
struct Extremes {
    uint32_t high[TILE / CHUNK], low[TILE / CHUNK];
};

using Quantize = void (*)(const void* values, uint8_t* codes, uint8_t* scales, int64_t size);
using Dequantize = void (*)(Coded from, void* values, int64_t size);
using Convert = void (*)(const void* from, void* to, int64_t size);
// sums = 0 if `fresh`, then += the terms, one after another; at most MAX_TERMS of them. With
// `extremes`, also those of the sums.
using Sum = void (*)(const Coded* terms, int count, bool fresh, float* sums, int64_t size,
                     Extremes* extremes);
using QuantizeSum = void (*)(const float* sums, const Extremes& extremes, uint8_t* codes,
                             uint8_t* scales, int64_t size);
using SumRaw = void (*)(const void* values, float* sums, int64_t size);
// Gradients are multiplied by `factor` as they are read.
using Adam = void (*)(const AdamScalars& with, float factor, const float* gradients,
                      float* parameters, float* means, float* squares, int64_t size);
// Both to bf16 by the random words of the elements from `place` on.
using Draw = void (*)(const uint32_t* keys, uint32_t place, const float* means,
                      const float* squares, uint16_t* to_means, uint16_t* to_squares, int64_t size);

struct Kernels {
    Quantize quantize[NUM_TYPES][NUM_WIDTHS];
    Dequantize dequantize[NUM_WIDTHS][NUM_TYPES];
    Convert convert[NUM_TYPES][NUM_TYPES];
    Sum sum[NUM_WIDTHS];
    QuantizeSum quantize_sum[NUM_WIDTHS];
    SumRaw sum_raw[NUM_TYPES];
    Adam adam;
    Draw draw;
};

// Null where the instruction set was not compiled or this processor has it not.
const Kernels* plain_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

// Those in use (csrc/cpu.cpp).
const Kernels& kernels();

}  // namespace zpp
