// The arithmetic of block quantization, once for every processor: docs/numerics.md says why.
//
// Rounding is half to even; build with contraction off (-ffp-contract=off, nvcc --fmad=false) and
// without fast-math. No torch, no C++ library: this header is for host and device alike.
#pragma once

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define ZPP_HD static __host__ __device__ __forceinline__
#else
#define ZPP_HD static inline
#endif

namespace zpp {

// Elements that share a scale; zeropp/quant/packing.py has the same.
constexpr int BLOCK8 = 256;
constexpr int BLOCK4 = 128;
// A block with no element of this magnitude becomes zeros (2^-94): scales, reciprocals, products
// and their sums are then never subnormal, so that flush-to-zero modes change nothing.
constexpr float TINY = 5.048709793414476e-29f;
constexpr uint16_t NAN_SCALE = 0x7FC0;
constexpr uint32_t INFINITY_BITS = 0x7F800000u;

ZPP_HD uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

ZPP_HD float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

ZPP_HD float from_bf16(uint16_t bits) { return float_of(uint32_t(bits) << 16); }

ZPP_HD uint16_t to_bf16(float value) {
    const uint32_t bits = bits_of(value);
    if ((bits & 0x7FFFFFFFu) > INFINITY_BITS) return NAN_SCALE;
    return uint16_t((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

ZPP_HD float from_fp16(uint16_t bits) {
#ifdef __CUDA_ARCH__
    float value;  // the same in one instruction
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    const uint32_t sign = uint32_t(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 31u, fraction = bits & 1023u;
    if (exponent == 0) {  // zero or subnormal: fraction * 2^-24
        return float_of(bits_of(float(fraction) * 5.9604644775390625e-8f) | sign);
    }
    if (exponent == 31) {
        const uint32_t quiet = fraction ? 0x400000u : 0u;
        return float_of(sign | INFINITY_BITS | quiet | (fraction << 13));
    }
    return float_of(sign | ((exponent + 112u) << 23) | (fraction << 13));
#endif
}

ZPP_HD uint16_t to_fp16(float value) {
    const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u;
    const uint32_t size = bits & 0x7FFFFFFFu;
    if (size > INFINITY_BITS) return uint16_t(sign | 0x7E00u);
    if (size >= 0x47800000u) return uint16_t(sign | 0x7C00u);  // from 65536 on
    if (size < 0x38800000u) {  // below 2^-14: the sum's last place is that of fp16's subnormals
        return uint16_t(sign | (bits_of(float_of(size) + 0.5f) - 0x3F000000u));
    }
    return uint16_t(sign | ((size + 0xFFFu + ((size >> 13) & 1u) - 0x38000000u) >> 13));
}

// Two 16-bit numbers in a word, the first in the lower half. A GPU's own instruction rounds alike;
// only a NaN may have other bits.
ZPP_HD uint32_t to_bf16_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
#else
    return to_bf16(first) | uint32_t(to_bf16(second)) << 16;
#endif
}

ZPP_HD uint32_t to_fp16_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
#else
    return to_fp16(first) | uint32_t(to_fp16(second)) << 16;
#endif
}

// All ones or none: what a block's scale needs has no branches, so that compilers make vectors of it.
ZPP_HD uint32_t mask_of(bool condition) { return 0u - uint32_t(condition); }

// The element of the largest magnitude, from its bits; the positive one of a tie. `high` is the
// largest of all bits read as signed integers, `low` as unsigned: the largest positive and the most
// negative element where there are both, else twice the same.
ZPP_HD uint32_t extreme_bits(uint32_t high, uint32_t low, uint32_t sign) {
    const uint32_t take_low = mask_of((high & ~sign) < (low & ~sign));
    return (high & ~take_low) | (low & take_low);
}

// The bf16 scale of a block: -extreme / 2^(bits-1), cut off to 8 significant bits, so that the
// extreme gets the code -2^(bits-1) and no code times its scale is larger than the extreme.
// 0 for a block of zeros or below TINY, NaN for a block that is not finite.
ZPP_HD uint32_t scale_of(float extreme, int bits) {
    const uint32_t size = bits_of(extreme) & 0x7FFFFFFFu;
    const uint32_t scale = bits_of(extreme * (bits == 8 ? -0.0078125f : -0.125f)) >> 16;
    const uint32_t finite = mask_of(size < INFINITY_BITS);
    return (scale & finite & mask_of(size >= bits_of(TINY))) | (NAN_SCALE & ~finite);
}

// What elements are multiplied by to give steps; 0 for a block whose codes are all 0.
ZPP_HD float steps_per_unit(uint32_t scale) {
    const uint32_t factor = bits_of(1.0f / float_of(scale << 16));
    return float_of(factor & mask_of((scale & 0x7FFF) != 0) & mask_of(scale != NAN_SCALE));
}

// The code of an element that is `steps` (at most 2^9) steps large: rounded half to even by adding
// 1.5 * 2^23, then clamped.
ZPP_HD int code_of(float steps, int bits) {
    const int low = bits == 8 ? -128 : -8, high = bits == 8 ? 127 : 7;
    const int rounded = int(bits_of(steps + 12582912.0f)) - 0x4B400000;
    const int above = rounded < low ? low : rounded;
    return above > high ? high : above;
}

// A code's value added to a sum. The product is exact, a code having at most 8 significant bits and
// a scale 8, so that a fused addition rounds alike. Added to 0, a value is never -0.
ZPP_HD float add_value(float code, float scale, float sum) {
#ifdef __CUDA_ARCH__
    return __fmaf_rn(code, scale, sum);
#else
    return sum + code * scale;
#endif
}

// Code i of a word of them, the sign bits turned over: exact, as the fraction of a number from 2^23
// on.
ZPP_HD float code_in(uint32_t turned, int i, int bits) {
    if (bits == 4) return float_of(0x4B000000u | (turned >> 4 * i & 15u)) - 8388616.0f;
#ifdef __CUDA_ARCH__  // one instruction puts the byte below the exponent's
    return float_of(__byte_perm(turned, 0x4B000000u, 0x7440u | uint32_t(i))) - 8388736.0f;
#else
    return float_of(0x4B000000u | (turned >> 8 * i & 255u)) - 8388736.0f;
#endif
}

}  // namespace zpp
