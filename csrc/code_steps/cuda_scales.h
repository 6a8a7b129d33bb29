// The scales that the blocks of a warp's tile go on with. A lane decides for the block with its number.
#pragma once

#include "../quantize/cuda_tile.h"
#include "cuda_digits.h"
#include "math.h"

namespace zpp {

// A block is in all lanes, in one or several units.
template <int VEC> struct BlockUnits {
    using S = Shape<INT8, VEC>;
    static_assert(S::BLOCKS == 1 && S::SPAN == LANES, "a block in half a warp");
    static constexpr int COUNT = S::GROUP, BLOCKS = S::UNITS / S::GROUP;
};

ZPP_DEVICE bool any_lane(bool condition) { return __ballot_sync(ALL, condition) != 0; }

// The codes of a unit in steps of another scale.
template <int VEC> ZPP_DEVICE Words<VEC> rescaled(const Words<VEC>& codes, float ratio) {
    float values[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) values[i] = code_in(codes.word[i / 4] ^ ONES << 7, i % 4, 8);
    return coded<INT8, VEC>(values, ratio);
}

// The bits of the largest magnitude in the tile's block number `lane`; 0 in lanes without a block.
template <int VEC> ZPP_DEVICE uint32_t largest_of(const Held<VEC>& held, int lane) {
    using B = BlockUnits<VEC>;
    uint32_t own = 0;
#pragma unroll
    for (int block = 0; block < B::BLOCKS; ++block) {
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < B::COUNT * VEC; ++i) {
            const float value = held.value[block * B::COUNT + i / VEC][i % VEC];
            const uint32_t magnitude = bits_of(value) & 0x7FFFFFFFu;
            largest = magnitude > largest ? magnitude : largest;
        }
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) {
            const uint32_t other = __shfl_xor_sync(ALL, largest, step);
            largest = other > largest ? other : largest;
        }
        if (lane == block) own = largest;
    }
    return own;
}

// What the choice of a block's scale needs to know of its codes.
struct CodeFacts {
    bool any, halve;  // some are not 0; all would be within reach with half the scale
};

template <int VEC>
ZPP_DEVICE CodeFacts facts_of(const Held<VEC>& held, const Coded<INT8, VEC>& read, int block,
                              float factor, uint32_t reach) {
    using B = BlockUnits<VEC>;
    uint32_t any = 0, beyond = 0;
#pragma unroll
    for (int u = block * B::COUNT; u < (block + 1) * B::COUNT; ++u) {
        const Words<VEC> nearest = coded<INT8, VEC>(held.value[u], factor);
#pragma unroll
        for (int w = 0; w < (VEC + 3) / 4; ++w) {
            const uint32_t codes = read.unit[u].word[w], twice = codes << 1 & ~ONES;
            any |= codes;
            beyond |= __vcmpgtu4(__vabsdiffs4(nearest.word[w], twice), reach * ONES);
            beyond |= __vcmpgtu4(__vabsdiffs4(codes, 0), (uint32_t(SMALL_CODES) - 1) * ONES);
        }
    }
    return {any_lane(any != 0), !any_lane(beyond != 0)};
}

// The new scale of block number `lane`. Only blocks whose scale may be halved look at their codes.
template <int VEC>
ZPP_DEVICE float next_scale(const Held<VEC>& held, const Coded<INT8, VEC>& read, int lane,
                            uint32_t reach) {
    const float scale = from_bf16(uint16_t(read.scale));
    const float size = from_bf16(uint16_t(read.scale & 0x7FFFu));
    const float largest = float_of(largest_of(held, lane));
    const bool small = largest < SMALL_CODES * size;
    const bool asks = is_scale(scale) && (small || largest < TINY);
    CodeFacts own = {};
    const uint32_t asking = __ballot_sync(ALL, asks);
    if (asking != 0) {
        const float factors = 1.0f / (scale * 0.5f);
#pragma unroll
        for (int block = 0; block < BlockUnits<VEC>::BLOCKS; ++block) {
            const float factor = __shfl_sync(ALL, factors, block);
            if (!(asking >> block & 1u)) continue;
            const CodeFacts facts = facts_of(held, read, block, factor, reach);
            if (lane == block) own = facts;
        }
    }
    return fitting_scale(largest, scale, own.any, small && own.halve, float(reach));
}

}  // namespace zpp
