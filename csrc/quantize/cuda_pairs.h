// A tile of 16-bit numbers, two to a word as they are in memory, until each becomes a code.
//
// Eight lanes hold 256 adjacent numbers, a block of INT8 or two of INT4. A lane has 8 of every 64, so
// that those lanes access whole lines.
#pragma once

#include "cuda_codes.h"
#include "cuda_tile.h"

namespace zpp {

constexpr int SHARING = 8;         // lanes
constexpr int AT_A_TIME = 8;       // adjacent numbers of a lane, 16 bytes
constexpr int TIMES = PER_LANE / AT_A_TIME;

// Index in the tile of the first number of a lane; it has the next ones STRIDE after those.
ZPP_DEVICE int first_of(const Tile& tile) {
    return tile.lane / SHARING * SHARING * PER_LANE + tile.lane % SHARING * AT_A_TIME;
}
constexpr int STRIDE = SHARING * AT_A_TIME;

struct Pairs {
    uint32_t word[TIMES][AT_A_TIME / 2];
};

// Beyond the end there are zeros.
ZPP_DEVICE void read_pairs(const uint8_t* from, const Tile& tile, Pairs* pairs) {
    *pairs = {};
    const bool wide = reinterpret_cast<uintptr_t>(from) % 16 == 0 && tile.size % AT_A_TIME == 0;
    const int left = tile.size - first_of(tile);
    from += first_of(tile) * 2;
#pragma unroll
    for (int t = 0; t < TIMES; ++t) {
        if (!wide || t * STRIDE >= left) continue;
        const auto piece = read_words<16>(from + t * STRIDE * 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs->word[t][i] = piece.word[i];
    }
    if (wide) return;
#pragma unroll
    for (int t = 0; t < TIMES; ++t) {
#pragma unroll
        for (int i = 0; i < AT_A_TIME; ++i) {
            const int at = t * STRIDE + i;
            if (at < left) pairs->word[t][i / 2] |= read_one<BF16>(from + at * 2) << i % 2 * 16;
        }
    }
}

// The extreme of a block that begins with what the lane has at this time, as `order_of` it.
template <Type T, Width W> ZPP_DEVICE float extreme_of_pairs(const Pairs& pairs, int time) {
    uint32_t high = 0x80008000u, low = 0;
#pragma unroll
    for (int i = 0; i < TIMES * Codes<W>::BLOCK / BLOCK8 * AT_A_TIME / 2; ++i) {
        const uint32_t word = pairs.word[time + i / (AT_A_TIME / 2)][i % (AT_A_TIME / 2)];
        high = __vmaxs2(high, word);
        low = __vmaxu2(low, word);
    }
    const int32_t first = int16_t(high), second = int32_t(high) >> 16;
    const uint32_t highest = uint32_t(first > second ? first : second) & 0xFFFFu;
    const uint32_t lowest = (low & 0xFFFFu) > low >> 16 ? low & 0xFFFFu : low >> 16;
    uint32_t order = order_of(bits_of(to_float<T>(extreme_bits(highest, lowest, 0x8000u))));
#pragma unroll
    for (int step = SHARING / 2; step > 0; step /= 2) {
        const uint32_t other = __shfl_xor_sync(ALL, order, step);
        order = other > order ? other : order;
    }
    return float_of(bits_of_order(order));
}

// Codes of INT8 or INT4; scales of INT8 may follow those that blocks had, `before`.
template <Type T, Width W>
ZPP_DEVICE void write_pairs(const Pairs& pairs, const Tile& tile, uint8_t* codes, uint8_t* scales,
                            const uint8_t* before = nullptr) {
    constexpr int BLOCKS = BLOCK8 / Codes<W>::BLOCK, BITS = Codes<W>::BITS;
    constexpr int ALIGNED = int(ALIGN) * 8 / BITS, BYTES = AT_A_TIME * BITS / 8;
    const int left = (tile.size + ALIGNED - 1) / ALIGNED * ALIGNED - first_of(tile);
    codes += first_of(tile) * BITS / 8;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        const int time = b * TIMES / BLOCKS, block = tile.lane / SHARING * BLOCKS + b;
        const float extreme = extreme_of_pairs<T, W>(pairs, time);
        const bool has_block = block * Codes<W>::BLOCK < tile.size;
        const uint32_t scale =
            before && has_block
                ? scale_after(extreme, reinterpret_cast<const uint16_t*>(before)[block])
                : scale_of(extreme, W);
        if (has_block && tile.lane % SHARING == 0) {
            reinterpret_cast<uint16_t*>(scales)[block] = uint16_t(scale);
        }
        const float factor = quick_factor_of(scale, W);
        const uint32_t usable = mask_of(factor != 0.0f);
#pragma unroll
        for (int t = time; t < time + TIMES / BLOCKS; ++t) {
            Words<BYTES> words;
#pragma unroll
            for (int i = 0; i < BYTES / 4; ++i) {
                const auto number = [&](int j) {
                    const uint32_t two = pairs.word[t][(i * (32 / BITS) + j) / 2];
                    if (T == FP16) return from_fp16(uint16_t(j % 2 ? two >> 16 : two));
                    return float_of(j % 2 ? two & 0xFFFF0000u : two << 16);
                };
                words.word[i] = word_of_codes<BITS>(number, factor, usable);
            }
            if (t * STRIDE < left) write_words<BYTES>(codes + t * STRIDE * BITS / 8, words);
        }
    }
}

}  // namespace zpp
