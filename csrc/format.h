// How numbers and packed rows lie in memory, for every processor: zeropp/quant/packing.py defines it.
// Element types and widths are numbered as zeropp/quant/library.py numbers them.
#pragma once

#include <stdint.h>

#include "adam_math.h"

namespace zpp {

enum Type { BF16 = 0, FP16 = 1, FP32 = 2, NUM_TYPES = 3 };
enum Width { INT8 = 0, INT4 = 1, NUM_WIDTHS = 2 };

constexpr int64_t VERSION = 2;  // zeropp/quant/library.py has the same: of what Python passes
constexpr int64_t ALIGN = 16;   // bytes
constexpr int RAW = 16;         // the "bits" of a segment that is not quantized
constexpr int64_t WORD_BYTES[NUM_TYPES] = {2, 2, 4};

template <Type T> struct Element { using Word = uint16_t; };
template <> struct Element<FP32> { using Word = uint32_t; };

template <Width W> struct Codes {
    static constexpr int BITS = 8, BLOCK = BLOCK8;
};
template <> struct Codes<INT4> {
    static constexpr int BITS = 4, BLOCK = BLOCK4;
};

// Where a segment is: elements of a row, bytes of a packed row.
struct Segment {
    int64_t start, size, bits, scales_at, data_at;

    Width width() const { return bits == 8 ? INT8 : INT4; }
    int64_t block() const { return bits == 8 ? BLOCK8 : BLOCK4; }
    int64_t blocks() const { return (size + block() - 1) / block(); }
    int64_t raw_end(int64_t wire) const { return data_at + size * WORD_BYTES[wire]; }
    int64_t scales_end() const { return scales_at + 2 * blocks(); }
    int64_t codes_end() const { return data_at + (size * bits + 7) / 8; }
};

struct Layout {
    const Segment* segments;
    int64_t count, elements, packed_bytes, wire;
};

// A parameter of Adam, what goes with it, and how many elements each of them has.
struct AdamTensor {
    const uint8_t* gradient;  // of the call's type
    float *parameter, *mean, *square;  // the moments of the call's type
    uint8_t* copy;  // of the call's type; null: none is written
    int64_t size;
};

struct AdamCall {
    const AdamTensor* tensors;
    int64_t count, gradient_type, copy_type, moment_type;  // moments: FP32, on CPUs also BF16
    const float* factor;  // of the gradients, where the tensors are; null: 1
    AdamScalars scalars;
};

// Bytes from a place in a packed row to the next aligned one.
static inline int64_t gap_after(int64_t place) { return -place & (ALIGN - 1); }

}  // namespace zpp
