// 32 adjacent numbers in the registers of a lane: those that are rotated together, so that only the
// extremes of blocks travel between lanes. A lane's codes are adjacent in memory too, 8 to 32 bytes.
#pragma once

#include "cuda_codes.h"
#include "cuda_three_bits.h"

namespace zpp {

static_assert(PER_LANE == ROTATED, "a lane holds what is rotated together");

// How a lane accesses its codes: PIECES of WORDS each.
template <Width W> struct Pieces {
    static constexpr int BITS = Codes<W>::BITS, WORDS = W == INT3 ? 1 : BITS < 4 ? BITS : 4;
    static constexpr int PIECES = BITS / WORDS, BYTES = 4 * WORDS;
    static constexpr int LANES_OF_BLOCK = Codes<W>::BLOCK / PER_LANE;
};

// Bytes that the codes of a tile take, up to the next aligned offset.
template <Width W> ZPP_DEVICE int code_bytes(const Tile& tile) {
    return ((tile.size * Codes<W>::BITS + 7) / 8 + int(ALIGN) - 1) / int(ALIGN) * int(ALIGN);
}

template <Width W> struct GroupOfCodes {
    uint32_t word[Codes<W>::BITS];
    uint32_t scale;
};

// A lane beyond the end reads what lane 0 does, and the last lane its first piece twice, so that
// nothing depends on a condition: what they hold is cleared, or not written.
template <Width W>
ZPP_DEVICE void read_group(const uint8_t* codes, const uint8_t* scales, const Tile& tile,
                           GroupOfCodes<W>* read) {
    using P = Pieces<W>;
    const int lane = tile.lane * PER_LANE < tile.size ? tile.lane : 0;
    const bool has_all = W != INT8 || lane * PER_LANE + P::BYTES < tile.size;
    read->scale = reinterpret_cast<const uint16_t*>(scales)[lane / P::LANES_OF_BLOCK];
    codes += lane * 4 * P::BITS;
#pragma unroll
    for (int i = 0; i < P::PIECES; ++i) {
        const auto piece = read_words<P::BYTES>(codes + (has_all ? i * P::BYTES : 0));
#pragma unroll
        for (int j = 0; j < P::WORDS; ++j) read->word[i * P::WORDS + j] = piece.word[j];
    }
}

template <Width W> ZPP_DEVICE void add_group(const GroupOfCodes<W>& read, float (&sums)[PER_LANE]) {
    const float scale = from_bf16(uint16_t(read.scale));
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        sums[i] = add_value(code_of_lane<W>(read.word, i), scale, sums[i]);
    }
}

// For sums: what is beyond the end may be anything.
ZPP_DEVICE void clear_beyond(const Tile& tile, float (&value)[PER_LANE]) {
    if (tile.size == WARP_TILE) return;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        if (tile.lane * PER_LANE + i >= tile.size) value[i] = 0.0f;
    }
}

ZPP_DEVICE void unrotate(float (&value)[PER_LANE]) {
    rotate_unit(value, 0);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) value[i] *= 1.0f / ROTATED;
}

// The extreme of the lane's block, of which rotated elements need the magnitude only.
template <Width W> ZPP_DEVICE float extreme_of_block(const float (&value)[PER_LANE]) {
    int32_t high = INT32_MIN;
    uint32_t low = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const uint32_t bits = bits_of(value[i]);
        high = int32_t(bits) > high ? int32_t(bits) : high;
        low = bits > low ? bits : low;
    }
    const uint32_t own = extreme_bits(uint32_t(high), low, 0x80000000u);
    uint32_t order = is_rotated(W) ? own & 0x7FFFFFFFu : order_of(own);
#pragma unroll
    for (int step = Pieces<W>::LANES_OF_BLOCK / 2; step > 0; step /= 2) {
        const uint32_t other = __shfl_xor_sync(ALL, order, step);
        order = other > order ? other : order;
    }
    return float_of(is_rotated(W) ? order : bits_of_order(order));
}

// Write numbers, zeros beyond the end, that are rotated already if W is.
template <Width W>
ZPP_DEVICE void write_group(const float (&value)[PER_LANE], const Tile& tile, uint8_t* codes,
                            uint8_t* scales) {
    using P = Pieces<W>;
    const int first = tile.lane * PER_LANE;
    const uint32_t scale = scale_of(extreme_of_block<W>(value), W);
    const float factor = quick_factor_of(scale, W);
    if (tile.lane % P::LANES_OF_BLOCK == 0 && first < tile.size) {
        reinterpret_cast<uint16_t*>(scales)[tile.lane / P::LANES_OF_BLOCK] = uint16_t(scale);
    }
    const uint32_t usable = mask_of(factor != 0.0f && first < tile.size);
    uint32_t words[P::BITS] = {};
    if constexpr (is_odd(W)) {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int at = i * P::BITS;
            const uint32_t code = W == INT2 ? uint32_t(two_bits_of(value[i], factor))
                                            : uint32_t(code_of(value[i] * factor, 3) + 4);
            words[at / 32] |= code << at % 32;
            if (at % 32 + P::BITS > 32) words[at / 32 + 1] |= code >> (32 - at % 32);
        }
#pragma unroll
        for (int i = 0; i < P::BITS; ++i) words[i] &= usable;
    } else {
#pragma unroll
        for (int i = 0; i < P::BITS; ++i) {
            const auto number = [&](int j) { return value[i * (32 / P::BITS) + j]; };
            words[i] = word_of_codes<P::BITS>(number, factor, usable);
        }
    }
    const int left = code_bytes<W>(tile) - tile.lane * 4 * P::BITS;
#pragma unroll
    for (int i = 0; i < P::PIECES; ++i) {
        Words<P::BYTES> piece;
#pragma unroll
        for (int j = 0; j < P::WORDS; ++j) piece.word[j] = words[i * P::WORDS + j];
        if (i * P::BYTES < left) {
            write_words<P::BYTES>(codes + tile.lane * 4 * P::BITS + i * P::BYTES, piece);
        }
    }
}

// Write numbers in the type T, in pieces of 16 bytes. Each two lanes give each other every second piece,
// so that they write adjacent ones.
template <Type T>
ZPP_DEVICE void write_numbers(const float (&value)[PER_LANE], const Tile& tile, uint8_t* to) {
    constexpr int SIZE = int(sizeof(typename Element<T>::Word)), VEC = 16 / SIZE;
    using N = Numbers<T, VEC>;
    N unit[PER_LANE / VEC];
#pragma unroll
    for (int i = 0; i < PER_LANE; i += 2) {
        unit[i / VEC].set_pair(i % VEC, value[i], value[i + 1]);
    }
    if (!fits<T, VEC>(to, tile.size)) {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int at = tile.lane * PER_LANE + i;
            const uint32_t word = unit[i / VEC].word[i % VEC * SIZE / 4] >> i * SIZE % 4 * 8;
            if (at < tile.size) {
                reinterpret_cast<typename Element<T>::Word*>(to)[at] = typename Element<T>::Word(word);
            }
        }
        return;
    }
    const bool odd = tile.lane % 2;
    const int first = tile.lane / 2 * 2 * PER_LANE + odd * VEC;
    to += first * SIZE;
#pragma unroll
    for (int i = 0; i < PER_LANE / VEC; i += 2) {
        N of_even, of_odd;  // pieces of those lanes
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint32_t own = unit[i + 1].word[j], other = unit[i].word[j];
            const uint32_t given = __shfl_xor_sync(ALL, odd ? other : own, 1);
            of_even.word[j] = odd ? given : other;
            of_odd.word[j] = odd ? own : given;
        }
        if (first + i * VEC < tile.size) of_even.write(to + i * 16);
        if (first + PER_LANE + i * VEC < tile.size) of_odd.write(to + PER_LANE * SIZE + i * 16);
    }
}

}  // namespace zpp
