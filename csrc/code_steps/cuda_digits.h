// The digits of a tile's steps in the shared memory of a thread block, and the bytes of a message that
// they are packed in. zeropp/quant/code_steps.py defines planes, lanes and numbers.
//
// A thread packs or unpacks W adjacent lanes of the message, one in each byte of a word: four of a whole
// tile, whose planes begin at multiples of 4, else one.
#pragma once

#include "../shared/cuda_numbers.h"
#include "message.h"

namespace zpp {

constexpr int STEP_WARPS = int(STEP_TILE + WARP_TILE - 1) / WARP_TILE;  // of a thread block: one tile's
constexpr int STEP_THREADS = STEP_WARPS * LANES;
constexpr int DIGITS = STEP_WARPS * WARP_TILE;  // bytes of shared memory
constexpr uint32_t ONES = 0x01010101u;          // a 1 in each byte of a word
constexpr uint32_t HALVES = 0x00FF00FFu;        // two of a word's bytes, as 16-bit numbers

static_assert(DIGITS >= STEP_TILE + 24, "digits beyond the end are packed as well");

// The numbers of W lanes, whose digits in BASE, the lowest first, are `stride` bytes apart.
template <int BASE, int COUNT, int W>
ZPP_DEVICE uint32_t numbers_in_bytes(const uint8_t* digits, int stride) {
    uint32_t numbers = 0;
#pragma unroll
    for (int i = COUNT - 1; i >= 0; --i) {
        numbers = numbers * BASE + read_words<W>(digits + i * stride).word[0];
    }
    return numbers;
}

template <int REACH, int W>
ZPP_DEVICE void pack_lanes(const uint8_t* digits, int lanes, uint8_t* steps) {
    if constexpr (REACH == 1) {
        write_words<W>(steps, {{numbers_in_bytes<3, 5, W>(digits, lanes)}});
    } else if constexpr (REACH == 2) {
        const uint32_t above = numbers_in_bytes<5, 3, W>(digits + 21 * lanes, lanes);
#pragma unroll
        for (int byte = 0; byte < 7; ++byte) {
            const uint32_t numbers = numbers_in_bytes<5, 3, W>(digits + 3 * byte * lanes, lanes);
            write_words<W>(steps + byte * lanes, {{numbers | (above >> byte & ONES) << 7}});
        }
    } else {
        uint32_t even = 0, odd = 0;  // lanes, two numbers of 16 bits each
#pragma unroll
        for (int i = 4; i >= 0; --i) {
            const uint32_t word = read_words<W>(digits + i * lanes).word[0];
            even = even * 9 + (word & HALVES);
            odd = odd * 9 + (word >> 8 & HALVES);
        }
        Words<2 * W> numbers;
        numbers.word[0] = (even & 0xFFFFu) | odd << 16;
        if constexpr (W == 4) numbers.word[1] = even >> 16 | (odd & 0xFFFF0000u);
        write_words<2 * W>(steps, numbers);
    }
}

// Each half of a word divided by BASE; exact for halves below 320.
template <int BASE> ZPP_DEVICE uint32_t quotients(uint32_t halves) {
    static_assert(BASE == 3 || BASE == 5, "a product must fit in 16 bits");
    return BASE == 3 ? halves * 171 >> 9 & 0x007F007Fu : halves * 205 >> 10 & 0x003F003Fu;
}

template <int BASE, int COUNT, int W>
ZPP_DEVICE void split_bytes(uint32_t numbers, uint8_t* digits, int stride) {
    uint32_t even = numbers & HALVES, odd = numbers >> 8 & HALVES;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const uint32_t next_even = quotients<BASE>(even), next_odd = quotients<BASE>(odd);
        const uint32_t low = even - next_even * BASE, high = odd - next_odd * BASE;
        write_words<W>(digits + i * stride, {{low | high << 8}});
        even = next_even;
        odd = next_odd;
    }
}

template <int REACH, int W>
ZPP_DEVICE void unpack_lanes(const uint8_t* steps, int lanes, uint8_t* digits) {
    if constexpr (REACH == 1) {
        split_bytes<3, 5, W>(read_words<W>(steps).word[0], digits, lanes);
    } else if constexpr (REACH == 2) {
        uint32_t above = 0, bytes[7];
#pragma unroll
        for (int byte = 0; byte < 7; ++byte) {
            bytes[byte] = read_words<W>(steps + byte * lanes).word[0];
        }
#pragma unroll
        for (int byte = 0; byte < 7; ++byte) {
            above |= (bytes[byte] >> 7 & ONES) << byte;
            split_bytes<5, 3, W>(bytes[byte] & ~(ONES << 7), digits + 3 * byte * lanes, lanes);
        }
        split_bytes<5, 3, W>(above, digits + 21 * lanes, lanes);
    } else {
        const auto read = read_words<2 * W>(steps);
        uint32_t numbers[W];
#pragma unroll
        for (int i = 0; i < W; ++i) numbers[i] = read.word[i / 2] >> 16 * (i % 2) & 0xFFFFu;
#pragma unroll
        for (int plane = 0; plane < 5; ++plane) {
            uint32_t word = 0;
#pragma unroll
            for (int i = 0; i < W; ++i) {
                word |= numbers[i] % 9 << 8 * i;
                numbers[i] /= 9;
            }
            write_words<W>(digits + plane * lanes, {{word}});
        }
    }
}

ZPP_DEVICE int lanes_of(int reach, int size) {
    return (size + planes_of(reach) - 1) / planes_of(reach);
}

// The lanes of a tile of `size` elements that are this thread's, from digits to steps or back.
template <int REACH, int W, bool PACKS>
ZPP_DEVICE void convert_lanes(int size, uint8_t* digits, uint8_t* steps) {
    const int lanes = lanes_of(REACH, W == 4 ? int(STEP_TILE) : size);
    for (int lane = int(threadIdx.x) * W; lane < lanes; lane += STEP_THREADS * W) {
        uint8_t* own = steps + lane * (REACH == 4 ? 2 : 1);
        if constexpr (PACKS) {
            pack_lanes<REACH, W>(digits + lane, lanes, own);
        } else {
            unpack_lanes<REACH, W>(own, lanes, digits + lane);
        }
    }
}

template <int REACH, bool PACKS>
ZPP_DEVICE void convert_tile(int size, uint8_t* digits, uint8_t* steps) {
    if (size == STEP_TILE) {
        convert_lanes<REACH, 4, PACKS>(size, digits, steps);
    } else {
        convert_lanes<REACH, 1, PACKS>(size, digits, steps);
    }
}

// A tile's digits, which all threads see, to its place in a message (PACKS) or back.
template <bool PACKS>
ZPP_DEVICE void convert_steps(int64_t reach, int size, uint8_t* digits, uint8_t* steps) {
    if (reach == 1) return convert_tile<1, PACKS>(size, digits, steps);
    if (reach == 2) return convert_tile<2, PACKS>(size, digits, steps);
    convert_tile<4, PACKS>(size, digits, steps);
}

}  // namespace zpp
