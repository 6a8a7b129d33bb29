// Codes of three bits in the registers of a warp, for VEC up to 8.
//
// Eight codes are 24 bits: those of 8 / VEC lanes. 32 codes, which are rotated together, are three
// words of memory, those of GROUP lanes.
#pragma once

#include "../shared/cuda_numbers.h"
#include "cuda_launch.h"

namespace zpp {

template <int VEC> struct ThreeBits {
    static_assert(VEC <= 8, "a lane holds at most eight adjacent numbers");
    static constexpr int SHARERS = 8 / VEC;      // lanes that hold eight codes
    static constexpr int GROUP = ROTATED / VEC;  // lanes
    static constexpr int BITS = 3 * VEC;         // of a lane's unit

    // Which eight of the 32 codes this lane holds some of.
    static __device__ __forceinline__ int eight_of(int lane) { return lane % GROUP / SHARERS; }
    // Where its codes are in these 24 bits.
    static __device__ __forceinline__ int shift_of(int lane) { return lane % SHARERS * BITS; }
    // Offset in the tile of the first of the three words.
    static __device__ __forceinline__ int words_at(int unit, int lane) { return unit * (LANES / GROUP * 12) + lane / GROUP * 12; }
};

// Multiply each ROTATED adjacent numbers, one unit of GROUP lanes, by the Hadamard matrix.
template <int VEC> ZPP_DEVICE void rotate_unit(float (&value)[VEC], int lane) {
#pragma unroll
    for (int stride = ROTATED / 2; stride >= VEC; stride /= 2) {
        const bool is_second = lane & stride / VEC;
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            const uint32_t bits = __shfl_xor_sync(ALL, bits_of(value[i]), stride / VEC);
            value[i] = float_of(bits) + (is_second ? -value[i] : value[i]);
        }
    }
#pragma unroll
    for (int stride = VEC / 2; stride > 0; stride /= 2) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            if (i & stride) continue;
            const float sum = value[i] + value[i + stride];
            value[i + stride] = value[i] - value[i + stride];
            value[i] = sum;
        }
    }
}

// Unit by unit, so that few numbers are on their way between lanes.
template <int UNITS, int VEC> ZPP_DEVICE void rotate(float (&value)[UNITS][VEC], int lane) {
#pragma unroll
    for (int u = 0; u < UNITS; ++u) rotate_unit(value[u], lane);
}

template <int UNITS, int VEC> ZPP_DEVICE void unrotate(float (&value)[UNITS][VEC], int lane) {
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
        rotate_unit(value[u], lane);
#pragma unroll
        for (int i = 0; i < VEC; ++i) value[u][i] *= 1.0f / ROTATED;
    }
}

// Write the codes of a lane's unit; `factor` is 0 for a block whose bytes are all 0. `end`: offset in
// the tile of the first byte that is not to be written.
template <int VEC>
ZPP_DEVICE void write_three_bits(const float (&value)[VEC], float factor, int unit, int lane, int end,
                                 uint8_t* codes) {
    using S = ThreeBits<VEC>;
    uint32_t eight = 0;
#pragma unroll
    for (int i = 0; i < VEC; ++i) eight |= uint32_t(code_of(value[i] * factor, 3) + 4) << 3 * i;
    eight = (eight & mask_of(factor != 0.0f)) << S::shift_of(lane);
#pragma unroll
    for (int step = S::SHARERS / 2; step > 0; step /= 2) eight |= __shfl_xor_sync(ALL, eight, step);
    const uint32_t next = __shfl_sync(ALL, eight, (lane + S::SHARERS) % LANES);
    const int word = S::eight_of(lane);
    const int at = S::words_at(0, lane) + 4 * word;  // the same for all units
    if (lane % S::SHARERS == 0 && word < 3 && S::words_at(unit, 0) < end - at) {
        const uint32_t bits = eight >> 8 * word | next << (24 - 8 * word);
        *reinterpret_cast<uint32_t*>(codes + at + S::words_at(unit, 0)) = bits;
    }
}

// The codes of a lane's unit, the first one in the lowest bits.
template <int VEC> ZPP_DEVICE uint32_t read_three_bits(const uint8_t* codes, int unit, int lane) {
    using S = ThreeBits<VEC>;
    const int eight = S::eight_of(lane), first = eight == 0 ? 0 : eight - 1;
    const uint8_t* place = codes + S::words_at(0, lane) + 4 * first;  // the same for all units
    const auto* words = reinterpret_cast<const uint32_t*>(place + S::words_at(unit, 0));
    const uint64_t both = words[0] | uint64_t(words[first < 2 ? 1 : 0]) << 32;
    return uint32_t(both >> (32 - 8 * eight) % 32) >> S::shift_of(lane);
}

// What code i of a word of codes of 3 or 2 bits stands for, in scales.
template <int BITS> ZPP_DEVICE float odd_in(uint32_t codes, int i) {
    constexpr uint32_t MASK = (1u << BITS) - 1u;
    return float_of(0x4B000000u | (codes >> BITS * i & MASK) << 1) - float(8388608 + MASK);
}

}  // namespace zpp
