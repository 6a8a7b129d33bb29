// Numbers between memory and codes that are not rotated, by eight lanes for 256 adjacent ones: a block
// of INT8, or two of INT4. Of each 128 bytes a lane has 16, so that the eight access whole lines. What is
// read stays as it is, two to a word if it has 16 bits, until each number becomes a code.
#pragma once

#include "cuda_codes.h"

namespace zpp {

constexpr int OCTET = 8;  // lanes

template <Type T> struct Octet {
    static constexpr int SIZE = int(sizeof(typename Element<T>::Word)), VEC = 16 / SIZE;
    static constexpr int TIMES = PER_LANE / VEC, STRIDE = OCTET * VEC;
    Numbers<T, VEC> unit[TIMES];

    // Index in the tile of the first number of a lane; it has the next ones STRIDE after those.
    static __device__ __forceinline__ int first(int lane) {
        return lane / OCTET * BLOCK8 + lane % OCTET * VEC;
    }
};

// How the codes of an octet's lane are accessed.
template <Type T, Width W> struct OctetCodes {
    static constexpr int BITS = Codes<W>::BITS, BLOCK = Codes<W>::BLOCK;
    static constexpr int BLOCKS = BLOCK8 / BLOCK, TIMES = Octet<T>::TIMES / BLOCKS;  // of a block
    static constexpr int BYTES = Octet<T>::VEC * BITS / 8;
    static constexpr int STRIDE = Octet<T>::STRIDE * BITS / 8;
};

// Beyond the end there are zeros.
template <Type T> ZPP_DEVICE void read_octet(const uint8_t* from, const Tile& tile, Octet<T>* octet) {
    using O = Octet<T>;
    *octet = {};
    const int left = tile.size - O::first(tile.lane);
    const bool wide = fits<T, O::VEC>(from, tile.size);
    from += O::first(tile.lane) * O::SIZE;
#pragma unroll
    for (int t = 0; t < O::TIMES; ++t) {
        if (wide && t * O::STRIDE < left) octet->unit[t].read(from + t * O::STRIDE * O::SIZE);
    }
    if (wide) return;
#pragma unroll
    for (int t = 0; t < O::TIMES; ++t) {
#pragma unroll
        for (int i = 0; i < O::VEC; ++i) {
            const int at = t * O::STRIDE + i;
            if (at >= left) continue;
            octet->unit[t].word[i * O::SIZE / 4] |= read_one<T>(from + at * O::SIZE) << i * O::SIZE % 4 * 8;
        }
    }
}

template <Type T> ZPP_DEVICE void write_octet(const Octet<T>& octet, const Tile& tile, uint8_t* to) {
    using O = Octet<T>;
    const int left = tile.size - O::first(tile.lane);
    const bool wide = fits<T, O::VEC>(to, tile.size);
    to += O::first(tile.lane) * O::SIZE;
#pragma unroll
    for (int t = 0; t < O::TIMES; ++t) {
        if (wide && t * O::STRIDE < left) octet.unit[t].write(to + t * O::STRIDE * O::SIZE);
    }
    if (wide) return;
#pragma unroll
    for (int t = 0; t < O::TIMES; ++t) {
#pragma unroll
        for (int i = 0; i < O::VEC; ++i) {
            const int at = t * O::STRIDE + i;
            const uint32_t word = octet.unit[t].word[i * O::SIZE / 4] >> i * O::SIZE % 4 * 8;
            using Word = typename Element<T>::Word;
            if (at < left) reinterpret_cast<Word*>(to)[at] = Word(word);
        }
    }
}

// The extreme of the block that begins at a time. Numbers of 16 bits are in the order of their bits too.
template <Type T, Width W> ZPP_DEVICE float extreme_of_block(const Octet<T>& octet, int time) {
    uint32_t high = T == FP32 ? 0x80000000u : 0x80008000u, low = 0;
#pragma unroll
    for (int i = 0; i < OctetCodes<T, W>::TIMES * 4; ++i) {
        const uint32_t word = octet.unit[time + i / 4].word[i % 4];
        if constexpr (T == FP32) {
            high = int32_t(word) > int32_t(high) ? word : high;
            low = word > low ? word : low;
        } else {
            high = __vmaxs2(high, word);
            low = __vmaxu2(low, word);
        }
    }
    if constexpr (T != FP32) {
        const int32_t first = int16_t(high), second = int32_t(high) >> 16;
        high = uint32_t(first > second ? first : second) & 0xFFFFu;
        low = (low & 0xFFFFu) > low >> 16 ? low & 0xFFFFu : low >> 16;
    }
    const uint32_t own = extreme_bits(high, low, T == FP32 ? 0x80000000u : 0x8000u);
    uint32_t order = order_of(bits_of(to_float<T>(own)));
#pragma unroll
    for (int step = OCTET / 2; step > 0; step /= 2) {
        const uint32_t other = __shfl_xor_sync(ALL, order, step);
        order = other > order ? other : order;
    }
    return float_of(bits_of_order(order));
}

// Write codes and the unused bytes after them. Scales of INT8 may follow those of a row that is `held`.
template <Type T, Width W>
ZPP_DEVICE void write_codes(const Octet<T>& octet, const Place& place, const Tile& tile,
                            uint8_t* packed, const uint8_t* held) {
    using C = OctetCodes<T, W>;
    const int64_t scales_at = place.scales_at + tile.first / C::BLOCK * 2;
    auto* scales = reinterpret_cast<uint16_t*>(packed + scales_at);
    const int own = Octet<T>::first(tile.lane) * C::BITS / 8, left = end_of_codes<W>(tile) - own;
    uint8_t* codes = packed + place.data_at + tile.first * C::BITS / 8 + own;
#pragma unroll
    for (int b = 0; b < C::BLOCKS; ++b) {
        const int time = b * C::TIMES, block = tile.lane / OCTET * C::BLOCKS + b;
        const float extreme = extreme_of_block<T, W>(octet, time);
        const bool inside = block * C::BLOCK < tile.size;
        const uint32_t scale =
            held && inside
                ? scale_after(extreme, reinterpret_cast<const uint16_t*>(held + scales_at)[block])
                : scale_of(extreme, W);
        if (inside && tile.lane % OCTET == 0) scales[block] = uint16_t(scale);
        const float factor = quick_factor_of(scale, W);
#pragma unroll
        for (int t = time; t < time + C::TIMES; ++t) {
            constexpr int IN_WORD = Octet<T>::VEC < 32 / C::BITS ? Octet<T>::VEC : 32 / C::BITS;
            Words<C::BYTES> words;
#pragma unroll
            for (int i = 0; i < Octet<T>::VEC / IN_WORD; ++i) {
                words.word[i] = word_of_codes<C::BITS, IN_WORD>(
                    [&](int j) { return octet.unit[t].get(i * IN_WORD + j); }, factor);
                words.word[i] &= mask_of(factor != 0.0f);
            }
            if (t * C::STRIDE < left) write_words<C::BYTES>(codes + t * C::STRIDE, words);
        }
    }
    clear_gap(place, tile, packed + scales_at + (tile.size + C::BLOCK - 1) / C::BLOCK * 2);
}

template <Type T, Width W>
ZPP_DEVICE void read_codes(const Place& place, const Tile& tile, const uint8_t* packed,
                           Octet<T>* octet) {
    using C = OctetCodes<T, W>;
    const int own = Octet<T>::first(tile.lane) * C::BITS / 8, left = end_of_codes<W>(tile) - own;
    const uint8_t* codes = packed + place.data_at + tile.first * C::BITS / 8 + own;
    const auto* scales = reinterpret_cast<const uint16_t*>(
        packed + place.scales_at + tile.first / C::BLOCK * 2);
    Words<C::BYTES> words[Octet<T>::TIMES] = {};
    uint32_t scale[C::BLOCKS] = {};
#pragma unroll
    for (int b = 0; b < C::BLOCKS; ++b) {
        const int block = tile.lane / OCTET * C::BLOCKS + b;
        if (block * C::BLOCK < tile.size) scale[b] = scales[block];
    }
#pragma unroll
    for (int t = 0; t < Octet<T>::TIMES; ++t) {
        if (t * C::STRIDE < left) words[t] = read_words<C::BYTES>(codes + t * C::STRIDE);
    }
#pragma unroll
    for (int t = 0; t < Octet<T>::TIMES; ++t) {
        const float size = from_bf16(uint16_t(scale[t / C::TIMES]));
#pragma unroll
        for (int i = 0; i < Octet<T>::VEC; i += 2) {
            const float first = add_value(code_of_lane<W>(words[t].word, i), size, 0.0f);
            const float second = add_value(code_of_lane<W>(words[t].word, i + 1), size, 0.0f);
            octet->unit[t].set_pair(i, first, second);
        }
    }
}

}  // namespace zpp
