// The arithmetic of block quantization, shared by host and device. docs/numerics.md explains it;
// zeropp/quant/reference.py is the same in PyTorch.
#pragma once

#include "../shared/numbers.h"

namespace zpp {

// Codes of INT3, ROTATED4 and INT2 stand for rotated elements. Those of ROTATED4 are packed as INT4's.
enum Width { INT8 = 0, INT4 = 1, INT3 = 2, ROTATED4 = 3, INT2 = 4, NUM_WIDTHS = 5 };

// Elements that share a scale; BLOCK in zeropp/quant/packing.py.
constexpr int BLOCK8 = 256;
constexpr int BLOCK4 = 128;  // of INT2, too
constexpr int BLOCK3 = 64;

// Elements that are rotated together.
constexpr int ROTATED = 32;

ZPP_HD constexpr int code_bits_of(Width width) {
    return width == INT8 ? 8 : width == INT3 ? 3 : width == INT2 ? 2 : 4;
}
ZPP_HD constexpr int block_of(Width width) {
    return width == INT8 ? BLOCK8 : width == INT3 ? BLOCK3 : BLOCK4;
}
ZPP_HD constexpr bool is_rotated(Width width) { return width >= INT3; }
// Whether codes stand for odd numbers of scales, so that none stands for 0.
ZPP_HD constexpr bool is_odd(Width width) { return width == INT3 || width == INT2; }

template <Width W> struct Codes {
    static constexpr int BITS = code_bits_of(W), BLOCK = block_of(W);
    static constexpr bool IS_ROTATED = is_rotated(W);
};

// A block with no element of at least this magnitude (2^-94) becomes zeros. Scales, reciprocals,
// products and their sums are then never subnormal, so flush-to-zero modes change nothing.
constexpr float TINY = 5.048709793414476e-29f;

// All ones or all zeros. Scales are computed without branches, so that compilers can vectorize.
ZPP_HD uint32_t mask_of(bool condition) { return 0u - uint32_t(condition); }

// The bits of the element with the largest magnitude; of a tie, the positive one. `high` is the
// maximum of all elements' bits as signed integers, `low` their maximum as unsigned integers: the
// largest positive and the most negative element if there are both, else twice the same.
ZPP_HD uint32_t extreme_bits(uint32_t high, uint32_t low, uint32_t sign) {
    const uint32_t take_low = mask_of((high & ~sign) < (low & ~sign));
    return (high & ~take_low) | (low & take_low);
}

// The bf16 scale of a block: -extreme / 2^(bits-1), truncated to 8 significant bits, so that the
// extreme gets the code -2^(bits-1) and no code times its scale exceeds the extreme. 0 for a block
// of zeros or below TINY, NaN for a block that is not finite. Of rotated elements, 1/7 of the
// magnitude, with 3 bits 9/64, with 2 bits 1/5 rounded to nearest.
ZPP_HD uint32_t scale_of(float extreme, Width width) {
    const uint32_t magnitude = bits_of(extreme) & 0x7FFFFFFFu;
    const float from = is_rotated(width) ? float_of(magnitude) : extreme;
    const float factor = width == INT8   ? -0.0078125f
                         : width == INT4 ? -0.125f
                         : width == INT3 ? 0.140625f
                         : width == INT2 ? 0.20000000298023223876953125f  // 13421773 / 2^26
                                         : 0.14285714924335479736328125f;  // 9586981 / 2^26
    const uint32_t exact = bits_of(from * factor);
    const uint32_t up = width == INT2 ? 0x7FFFu + (exact >> 16 & 1u) : 0u;
    const uint32_t scale = (exact + up) >> 16;
    const uint32_t finite = mask_of(magnitude < INFINITY_BITS);
    return (scale & finite & mask_of(magnitude >= bits_of(TINY))) | (BF16_NAN & ~finite);
}

constexpr float MOST_CODES = 129.0f;  // that the largest element may need: a truncated scale has them
constexpr float FEW_CODES = 58.0f;    // 45% of what there are: a block that needs fewer doubles them
constexpr float GROWN = float(1.25 / 127);  // of the largest element: the scale of a block that grows

// The bf16 scale with which a block of INT8 codes goes on whose scale was `held`: the same one while it
// fits, so that few codes change from step to step. Without one, as that of a block which grows.
ZPP_HD uint32_t scale_after(float extreme, uint32_t held) {
    const uint32_t fresh = scale_of(extreme, INT8);
    if (fresh == 0 || fresh == BF16_NAN) return fresh;
    const float largest = float_of(bits_of(extreme) & 0x7FFFFFFFu);
    const float size = float_of((held & 0x7FFFu) << 16);
    const bool has_scale = size > 0.0f && (held & 0x7F80u) != 0x7F80u;
    const uint32_t sign = has_scale ? held & 0x8000u : 0u;
    if (!has_scale || largest > MOST_CODES * size) return bits_of(largest * GROWN) >> 16 | sign;
    return largest < FEW_CODES * size ? bits_of(size * 0.5f) >> 16 | sign : held;
}

// The factor that turns elements into steps, or with 2 bits the distance of two codes; 0 for a block
// whose bytes are all 0.
ZPP_HD float factor_of(uint32_t scale, Width width) {
    const float size = float_of(scale << 16);
    const uint32_t factor = bits_of(width == INT2 ? 2.0f * size : 1.0f / size);
    return float_of(factor & mask_of((scale & 0x7FFF) != 0) & mask_of(scale != BF16_NAN));
}

// The code of an element of `steps` steps (at most 2^9): rounded half to even by adding
// 1.5 * 2^23, then clamped. With 3 bits, code c stands for 2 c + 1 steps.
ZPP_HD int code_of(float steps, int bits) {
    const int lowest = -(1 << (bits - 1)), highest = -lowest - 1;
    const float exact = bits == 3 ? steps * 0.5f - 0.5f : steps;
    const int rounded = int(bits_of(exact + 12582912.0f)) - 0x4B400000;
    const int clamped = rounded < lowest ? lowest : rounded;
    return clamped > highest ? highest : clamped;
}

// The code 0 ... 3, for -3, -1, 1 and 3 scales, of an element: floor(element / distance) + 2, clamped.
// A rounded quotient reaches a whole number exactly if the element reaches that many distances.
ZPP_HD int two_bits_of(float element, float distance) {
    return int(element >= -distance) + int(element >= 0.0f) + int(element >= distance);
}

// Add the value of a code to a sum. A code and a scale have at most 8 significant bits each, so
// their product is exact and a fused multiply-add rounds the same way. A value added to 0 is never
// -0.
ZPP_HD float add_value(float code, float scale, float sum) {
#ifdef __CUDA_ARCH__
    return __fmaf_rn(code, scale, sum);
#else
    return sum + code * scale;
#endif
}

// Code i of a word of codes whose sign bits are flipped. Exact: the code becomes the fraction of a
// number of at least 2^23.
ZPP_HD float code_in(uint32_t flipped, int i, int bits) {
    if (bits == 4) return float_of(0x4B000000u | (flipped >> 4 * i & 15u)) - 8388616.0f;
#ifdef __CUDA_ARCH__  // one instruction puts the byte below the exponent's
    return float_of(__byte_perm(flipped, 0x4B000000u, 0x7440u | uint32_t(i))) - 8388736.0f;
#else
    return float_of(0x4B000000u | (flipped >> 8 * i & 255u)) - 8388736.0f;
#endif
}

}  // namespace zpp
