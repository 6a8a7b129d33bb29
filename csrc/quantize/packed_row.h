// Where the values, scales and codes of a packed row are. zeropp/quant/packing.py defines and
// computes it; here its numbers are only read.
#pragma once

#include "math.h"

namespace zpp {

constexpr int64_t ALIGN = 16;  // bytes
constexpr int RAW = 16;        // the "bits" of a segment that is not quantized
constexpr int ROTATED_4 = ROTATED + 4;  // those of a segment of ROTATED4

ZPP_HD Width width_of(int64_t bits) {  // of a segment that is not RAW
    return bits == 8 ? INT8 : bits == 4 ? INT4 : bits == 3 ? INT3 : bits == 2 ? INT2 : ROTATED4;
}
ZPP_HD bool is_rotated(int64_t bits) { return bits != RAW && is_rotated(width_of(bits)); }

// The place of a segment: elements of a row, bytes of a packed row.
struct Segment {
    int64_t start, size, bits, scales_at, data_at;

    Width width() const { return width_of(bits); }
    int64_t code_bits() const { return code_bits_of(width()); }
    int64_t block() const { return block_of(width()); }
    int64_t blocks() const { return (size + block() - 1) / block(); }
    int64_t raw_end(int64_t wire) const { return data_at + size * WORD_BYTES[wire]; }
    int64_t scales_end() const { return scales_at + 2 * blocks(); }
    int64_t codes_end() const { return data_at + (size * code_bits() + 7) / 8; }
};

// `Layout.table` as it is in memory: this header, then the segments.
struct Layout {
    int64_t elements, packed_bytes, wire, count;

    const Segment* segments() const { return reinterpret_cast<const Segment*>(this + 1); }
};

// Bytes from an offset in a packed row to the next aligned one.
ZPP_HD int64_t gap_after(int64_t offset) { return -offset & (ALIGN - 1); }

}  // namespace zpp
