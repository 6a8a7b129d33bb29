// Element types, and conversions between them that round alike on host and device.
//
// Rounding is half to even. Build with contraction off (-ffp-contract=off, nvcc --fmad=false) and
// without fast-math. No torch and no C++ library is needed.
#pragma once

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define ZPP_HD static __host__ __device__ __forceinline__
#else
#define ZPP_HD static inline
#endif
#define ZPP_INLINE static inline __attribute__((always_inline))

namespace zpp {

// In the order of FLOATS in zeropp/quant/packing.py.
enum Type { BF16 = 0, FP16 = 1, FP32 = 2, NUM_TYPES = 3 };

constexpr int64_t WORD_BYTES[NUM_TYPES] = {2, 2, 4};
constexpr uint16_t BF16_NAN = 0x7FC0;
constexpr uint32_t INFINITY_BITS = 0x7F800000u;

template <Type T> struct Element { using Word = uint16_t; };
template <> struct Element<FP32> { using Word = uint32_t; };

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

ZPP_HD bool is_finite(float value) { return (bits_of(value) & INFINITY_BITS) != INFINITY_BITS; }

ZPP_HD float from_bf16(uint16_t bits) { return float_of(uint32_t(bits) << 16); }

ZPP_HD uint16_t to_bf16(float value) {
    const uint32_t bits = bits_of(value);
    if ((bits & 0x7FFFFFFFu) > INFINITY_BITS) return BF16_NAN;
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
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > INFINITY_BITS) return uint16_t(sign | 0x7E00u);
    if (magnitude >= 0x47800000u) return uint16_t(sign | 0x7C00u);  // 65536 and above
    if (magnitude < 0x38800000u) {  // below 2^-14: the last place of the sum is that of a subnormal
        return uint16_t(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u));
    }
    return uint16_t(sign | ((magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13));
}

// Two 16-bit numbers in a word, the first one in the lower half. A GPU's own instruction rounds the
// same way; only the bits of a NaN may differ.
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

template <Type T> ZPP_HD float to_float(uint32_t word) {
    return T == BF16   ? from_bf16(uint16_t(word))
           : T == FP16 ? from_fp16(uint16_t(word))
                       : float_of(word);
}

}  // namespace zpp
