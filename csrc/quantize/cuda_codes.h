// Codes packed and unpacked in a lane's registers, with few instructions of a GPU's integer units, which
// take half as many in a cycle as those for fp32 do.
#pragma once

#include "../shared/cuda_numbers.h"
#include "cuda_launch.h"

namespace zpp {

// Integers in the order that extreme_bits has: by magnitude, and of a tie the positive one above.
ZPP_DEVICE uint32_t order_of(uint32_t bits) { return (bits << 1 | bits >> 31) ^ 1u; }
ZPP_DEVICE uint32_t bits_of_order(uint32_t order) {
    return (order ^ 1u) >> 1 | (order ^ 1u) << 31;
}

// As factor_of. One step of Newton's method rounds what the instruction finds, which is at most one unit
// in the last place away; scales are never so small or large that it had to be asked.
ZPP_DEVICE float quick_factor_of(uint32_t scale, Width width) {
#ifdef __CUDA_ARCH__
    const float size = float_of(scale << 16);
    float near;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(size));
    const float factor = width == INT2 ? 2.0f * size : __fmaf_rn(near, __fmaf_rn(-size, near, 1.0f), near);
    return (scale & 0x7FFFu) != 0 && scale != BF16_NAN ? factor : 0.0f;
#else
    return factor_of(scale, width);
#endif
}

// 1.5 * 2^23, which rounds what is added to it half to even, and its bits.
constexpr float ROUNDER = 12582912.0f;
constexpr int32_t ROUNDER_BITS = 0x4B400000;

ZPP_DEVICE int32_t rounded(float steps) { return int32_t(bits_of(steps + ROUNDER)) - ROUNDER_BITS; }

// Clamp two integers to BITS bits and put them below the lower bits of `above`.
template <int BITS> ZPP_DEVICE uint32_t pack_two(int32_t first, int32_t second, uint32_t above) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
    uint32_t word;
    if constexpr (BITS == 8) {
        asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;"
            : "=r"(word) : "r"(second), "r"(first), "r"(above));
    } else {
        asm("cvt.pack.sat.s4.s32.b32 %0, %1, %2, %3;"
            : "=r"(word) : "r"(second), "r"(first), "r"(above));
    }
    return word;
#else
    constexpr int32_t TOP = (1 << (BITS - 1)) - 1;
    constexpr uint32_t MASK = (1u << BITS) - 1u;
    const int32_t low = first > TOP ? TOP : first < -TOP - 1 ? -TOP - 1 : first;
    const int32_t high = second > TOP ? TOP : second < -TOP - 1 ? -TOP - 1 : second;
    return (uint32_t(low) & MASK) | (uint32_t(high) & MASK) << BITS | above << 2 * BITS;
#endif
}

// A word of codes of 8 or 4 bits; `number` gives the elements. Blocks whose bytes are all 0 are not `usable`.
template <int BITS, class N>
ZPP_DEVICE uint32_t word_of_codes(const N& number, float factor, uint32_t usable) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 32 / BITS - 2; i >= 0; i -= 2) {
        word = pack_two<BITS>(rounded(number(i) * factor), rounded(number(i + 1) * factor), word);
    }
    return word & usable;
}

// (word & mask) ^ bits, which compilers take two instructions for if both are constants.
ZPP_DEVICE uint32_t and_xor(uint32_t word, uint32_t mask, uint32_t bits) {
#ifdef __CUDA_ARCH__
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
    return result;
#else
    return (word & mask) ^ bits;
#endif
}

// Code i of a lane's 32, in scales. Codes of 4, 3 and 2 bits stay where they are in a word, as long as
// they fit a fraction: the exponent gives them their weight. `i` is known to the compiler, which shifts
// a word once for all codes that it then has in place.
template <Width W> ZPP_DEVICE float code_of_lane(const uint32_t* words, int i) {
    constexpr int BITS = Codes<W>::BITS, ODD = is_odd(W) ? 1 : 0;
    constexpr uint32_t MASK = (1u << BITS) - 1u;
    if constexpr (W == INT8) return code_in(words[i / 4] ^ 0x80808080u, i % 4, 8);
    constexpr int IN_PLACE = BITS == 4 ? 4 : BITS == 3 ? 7 : 8;
    const int from = i / IN_PLACE * IN_PLACE * BITS - ODD, at = ODD + BITS * (i % IN_PLACE);
    uint32_t word = from < 0 ? words[0] << 1 : words[from / 32] >> from % 32;
    if (from >= 0 && from % 32 + ODD + IN_PLACE * BITS > 32 && from / 32 + 1 < BITS) {
        word |= words[from / 32 + 1] << (32 - from % 32);
    }
    const int exponent = 23 + ODD - at;
    const uint32_t flipped = uint32_t(127 + exponent) << 23 | (ODD ? 0u : 8u << at);
    const float none = float(1 << exponent) + float(ODD ? MASK : 8u);
    return float_of(and_xor(word, MASK << at, flipped)) - none;
}

// Write number `i` in the type `wire`.
ZPP_DEVICE void write_one(int wire, float number, uint8_t* to, int i) {
    if (wire == FP32) {
        reinterpret_cast<float*>(to)[i] = number;
    } else {
        const uint32_t word = wire == BF16 ? to_bf16_pair(number, 0.0f) : to_fp16_pair(number, 0.0f);
        reinterpret_cast<uint16_t*>(to)[i] = uint16_t(word);
    }
}

}  // namespace zpp
