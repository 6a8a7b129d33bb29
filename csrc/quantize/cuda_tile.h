// A tile in the registers of a warp: as numbers, and as the codes of a packed row.
//
// A lane holds PER_LANE numbers as units of VEC adjacent ones. The units of 32 lanes are adjacent
// too, so that a warp accesses one contiguous piece of memory. VEC = 2 is for memory that wider
// accesses may not touch; its numbers are read one by one. The numbers of a block stay in registers
// between finding their maximum and writing their codes.
//
// A warp asks for a whole tile before it uses any of it. A lane then waits for 32 bytes (codes to be
// decoded) to 128, and the 16 to 40 warps that a multiprocessor's registers hold wait for 32 to
// 100 KB. Hiding 800 ns at the 4.8 TB/s of an H200's 132 multiprocessors takes 29 KB each.
#pragma once

#include "cuda_codes.h"
#include "cuda_three_bits.h"

namespace zpp {

template <int VEC> struct Held {
    static constexpr int UNITS = PER_LANE / VEC;
    float value[UNITS][VEC];
};

// Beyond the end a lane holds zeros, which do not change the extremes of the others.
template <Type T, int VEC>
ZPP_DEVICE void read_numbers(const uint8_t* from, const Tile& tile, Held<VEC>* held) {
    using N = Numbers<T, VEC>;
    N units[Held<VEC>::UNITS] = {};
    const int left = tile.size - tile.at<VEC>(0);
    from += tile.at<VEC>(0) * N::SIZE;
#pragma unroll
    for (int u = 0; u < Held<VEC>::UNITS; ++u) {
        const int skip = u * LANES * VEC;
        const uint8_t* unit = from + skip * N::SIZE;
        if constexpr (VEC == 2) {
            uint32_t first = 0, second = 0;
            if (skip < left) first = read_one<T>(unit);
            if (skip + 1 < left) second = read_one<T>(unit + N::SIZE);
            if constexpr (T == FP32) units[u].word[1] = second;
            units[u].word[0] = T == FP32 ? first : first | second << 16;
        } else {
            if (skip < left) units[u].read(unit);
        }
    }
#pragma unroll
    for (int u = 0; u < Held<VEC>::UNITS; ++u) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) held->value[u][i] = units[u].get(i);
    }
}

template <Type T, int VEC>
ZPP_DEVICE void write_numbers(const Held<VEC>& held, const Tile& tile, uint8_t* to) {
    using N = Numbers<T, VEC>;
    using Word = typename Element<T>::Word;
    const int left = tile.size - tile.at<VEC>(0);
    to += tile.at<VEC>(0) * N::SIZE;
#pragma unroll
    for (int u = 0; u < Held<VEC>::UNITS; ++u) {
        const int skip = u * LANES * VEC;
        N unit;
#pragma unroll
        for (int i = 0; i < VEC; i += 2) {
            unit.set_pair(i, held.value[u][i], held.value[u][i + 1]);
        }
        if constexpr (VEC == 2) {
            Word* numbers = reinterpret_cast<Word*>(to + skip * N::SIZE);
            const uint32_t second = T == FP32 ? unit.word[N::BYTES / 4 - 1] : unit.word[0] >> 16;
            if (skip < left) numbers[0] = Word(unit.word[0]);
            if (skip + 1 < left) numbers[1] = Word(second);
        } else {
            if (skip < left) unit.write(to + skip * N::SIZE);
        }
    }
}

// For sums: the bytes after a segment's codes may hold anything.
template <int VEC> ZPP_DEVICE void clear_beyond(const Tile& tile, Held<VEC>* held) {
    if (tile.size == WARP_TILE) return;
#pragma unroll
    for (int u = 0; u < Held<VEC>::UNITS; ++u) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            if (tile.at<VEC>(u) + i >= tile.size) held->value[u][i] = 0.0f;
        }
    }
}

template <int VEC> ZPP_DEVICE void clear(Held<VEC>* held) {
#pragma unroll
    for (int u = 0; u < Held<VEC>::UNITS; ++u) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) held->value[u][i] = 0.0f;
    }
}

// Raw values of a packed row, in the type `wire`.
template <int VEC>
ZPP_DEVICE void read_wire(int wire, const uint8_t* from, const Tile& tile, Held<VEC>* held) {
    if (wire == BF16) return read_numbers<BF16, VEC>(from, tile, held);
    if (wire == FP16) return read_numbers<FP16, VEC>(from, tile, held);
    read_numbers<FP32, VEC>(from, tile, held);
}

template <int VEC>
ZPP_DEVICE void write_wire(int wire, const Held<VEC>& held, const Tile& tile, uint8_t* to) {
    if (wire == BF16) return write_numbers<BF16, VEC>(held, tile, to);
    if (wire == FP16) return write_numbers<FP16, VEC>(held, tile, to);
    write_numbers<FP32, VEC>(held, tile, to);
}

template <int VEC> ZPP_DEVICE bool wire_fits(int wire, const uint8_t* place, int size) {
    if (wire == FP32) return fits<FP32, VEC>(place, size);
    return fits<BF16, VEC>(place, size);
}

// How a tile divides into units and blocks. A group is the smallest number of units that are whole
// blocks.
template <Width W, int VEC> struct Shape {
    static constexpr int BITS = Codes<W>::BITS, BLOCK = Codes<W>::BLOCK;
    static constexpr int UNITS = Held<VEC>::UNITS;
    static constexpr int UNIT = LANES * VEC;  // elements of a unit in all lanes together
    static constexpr int GROUP = UNIT < BLOCK ? BLOCK / UNIT : 1;          // units
    static constexpr int BLOCKS = UNIT < BLOCK ? 1 : UNIT / BLOCK;         // of a group
    static constexpr int SPAN = LANES / BLOCKS;                            // lanes of a block
    static constexpr int SHARERS = VEC * BITS < 8 && W == INT2 ? 8 / (VEC * BITS) : 1;  // lanes of a byte
    static constexpr int BYTES = W == INT3 ? 4 : SHARERS * VEC * BITS / 8;  // of a lane's unit
    static constexpr int ALIGNED = int(ALIGN) * 8 / BITS;                  // elements, not INT3
};

// The extreme, as order_of, of the tile's block number `lane`; undefined in lanes without a block.
template <Width W, int VEC> ZPP_DEVICE uint32_t extreme_of(const Held<VEC>& held, int lane) {
    using S = Shape<W, VEC>;
    uint32_t own = 0;
#pragma unroll
    for (int group = 0; group < S::UNITS / S::GROUP; ++group) {
        int32_t high = INT32_MIN;
        uint32_t low = 0;
#pragma unroll
        for (int i = 0; i < S::GROUP * VEC; ++i) {
            const uint32_t bits = bits_of(held.value[group * S::GROUP + i / VEC][i % VEC]);
            high = int32_t(bits) > high ? int32_t(bits) : high;
            low = bits > low ? bits : low;
        }
        uint32_t order = order_of(extreme_bits(uint32_t(high), low, 0x80000000u));
#pragma unroll
        for (int step = S::SPAN / 2; step > 0; step /= 2) {
            const uint32_t other = __shfl_xor_sync(ALL, order, step);
            order = other > order ? other : order;
        }
        if (S::BLOCKS > 1) order = __shfl_sync(ALL, order, lane % S::BLOCKS * S::SPAN);
        if (lane / S::BLOCKS == group) own = order;
    }
    return own;
}

// The codes of a unit, as many to a word as it has room for.
template <Width W, int VEC>
ZPP_DEVICE Words<Shape<W, VEC>::BYTES> coded(const float* values, float factor) {
    using S = Shape<W, VEC>;
    constexpr int PER_WORD = 32 / S::BITS;
    constexpr uint32_t MASK = (1u << S::BITS) - 1u;
    const uint32_t usable = mask_of(factor != 0.0f);
    Words<S::BYTES> words;
#pragma unroll
    for (int first = 0; first < VEC; first += PER_WORD) {
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < PER_WORD && first + i < VEC; ++i) {
            const float value = values[first + i];
            const int code = W == INT2 ? two_bits_of(value, factor) : code_of(value * factor, S::BITS);
            word |= (uint32_t(code) & MASK) << i * S::BITS;
        }
        words.word[first / PER_WORD] = word & usable;
    }
    return words;
}

// `held` has zeros beyond the end. The bytes up to the next aligned offset are written too. `scaled_as`
// is W, or ROTATED4 for W = INT4. Scales of INT8 may follow those that blocks had, `before`.
template <Width W, int VEC>
ZPP_DEVICE void write_codes(const Held<VEC>& held, const Tile& tile, Width scaled_as,
                            uint8_t* codes, uint8_t* scales, const uint8_t* before = nullptr) {
    using S = Shape<W, VEC>;
    // One division for all blocks: each lane computes the factor of the block with its number.
    const float extreme = float_of(bits_of_order(extreme_of<W, VEC>(held, tile.lane)));
    const bool has_block = tile.lane * S::BLOCK < tile.size;
    const uint32_t scale =
        before && has_block
            ? scale_after(extreme, reinterpret_cast<const uint16_t*>(before)[tile.lane])
            : scale_of(extreme, scaled_as);
    const float factors = factor_of(scale, scaled_as);
    if (has_block) reinterpret_cast<uint16_t*>(scales)[tile.lane] = uint16_t(scale);
    if constexpr (W == INT3) {
        const int end = (tile.size / 8 * 3 + int(ALIGN) - 1) / int(ALIGN) * int(ALIGN);
#pragma unroll
        for (int u = 0; u < S::UNITS; ++u) {
            const int block = u * (S::UNIT / S::BLOCK) + tile.at<VEC>(0) / S::BLOCK;
            const float factor = __shfl_sync(ALL, factors, block);
            write_three_bits<VEC>(held.value[u], factor, u, tile.lane, end, codes);
        }
        return;
    }
    const int end = (tile.size + S::ALIGNED - 1) / S::ALIGNED * S::ALIGNED;
    codes += tile.lane / S::SHARERS * S::BYTES;
#pragma unroll
    for (int u = 0; u < S::UNITS; ++u) {
        const int at = tile.at<VEC>(u);
        const float factor = __shfl_sync(ALL, factors, at / S::BLOCK);
        auto words = coded<W, VEC>(held.value[u], factor);
        if constexpr (W == INT2) words.word[0] &= mask_of(at < tile.size);  // 0 has another code
        if constexpr (S::SHARERS > 1) {
            words.word[0] <<= tile.lane % S::SHARERS * (VEC * S::BITS);
            words.word[0] |= __shfl_xor_sync(ALL, words.word[0], 1);
        }
        const bool writes = at < end && tile.lane % S::SHARERS == 0;
        if (writes) write_words<S::BYTES>(codes + u * (LANES / S::SHARERS) * S::BYTES, words);
    }
}

template <Width W, int VEC> struct Coded {
    Words<Shape<W, VEC>::BYTES> unit[Held<VEC>::UNITS];
    uint32_t scale;  // of the tile's block number `lane`
};

// Codes beyond the end are zeros.
template <Width W, int VEC>
ZPP_DEVICE void read_codes(const uint8_t* codes, const uint8_t* scales, const Tile& tile,
                           Coded<W, VEC>* read) {
    using S = Shape<W, VEC>;
    *read = {};
    if (tile.lane * S::BLOCK < tile.size) {
        read->scale = reinterpret_cast<const uint16_t*>(scales)[tile.lane];
    }
    const int left = tile.size - tile.at<VEC>(0);
    if constexpr (W == INT3) {
#pragma unroll
        for (int u = 0; u < S::UNITS; ++u) {
            if (u * S::UNIT < left) {
                read->unit[u].word[0] = read_three_bits<VEC>(codes, u, tile.lane);
            }
        }
        return;
    }
    codes += tile.lane / S::SHARERS * S::BYTES;
#pragma unroll
    for (int u = 0; u < S::UNITS; ++u) {
        if (u * S::UNIT < left) {
            read->unit[u] = read_words<S::BYTES>(codes + u * (LANES / S::SHARERS) * S::BYTES);
            read->unit[u].word[0] >>= tile.lane % S::SHARERS * (VEC * S::BITS);
        }
    }
}

template <Width W, int VEC>
ZPP_DEVICE void add_codes(const Coded<W, VEC>& read, const Tile& tile, Held<VEC>* sums) {
    using S = Shape<W, VEC>;
    constexpr int PER_WORD = 32 / S::BITS;
    constexpr uint32_t SIGNS = W == INT8 ? 0x80808080u : 0x88888888u;
#pragma unroll
    for (int u = 0; u < S::UNITS; ++u) {
        const uint32_t bits = __shfl_sync(ALL, read.scale, tile.at<VEC>(u) / S::BLOCK);
        const float scale = from_bf16(uint16_t(bits));
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            const uint32_t word = read.unit[u].word[is_odd(W) ? 0 : i / PER_WORD];
            const float code = is_odd(W) ? odd_in<S::BITS>(word, i)
                                         : code_in(word ^ SIGNS, i % PER_WORD, S::BITS);
            sums->value[u][i] = add_value(code, scale, sums->value[u][i]);
        }
    }
}

// Write zeros to the unused bytes after the end of a segment's scales or raw values.
ZPP_DEVICE void clear_gap(const Place& place, const Tile& tile, uint8_t* end) {
    if (tile.is_last && tile.lane < place.gap) end[tile.lane] = 0;
}

template <int VEC>
ZPP_DEVICE void put_raw(const Held<VEC>& held, const Place& place, int wire, const Tile& tile,
                        uint8_t* packed) {
    uint8_t* to = raw_at(place, wire, tile, packed);
    write_wire(wire, held, tile, to);
    clear_gap(place, tile, to + tile.size * word_bytes(wire));
}

// Write `held`, which has zeros beyond the end, to its place in a packed row. `rotated`: whether its
// values are rotated already.
template <int VEC>
ZPP_DEVICE void put(const Held<VEC>& held, bool rotated, const Place& place, int wire,
                    const Tile& tile, uint8_t* packed) {
    if (place.bits == RAW) return put_raw(held, place, wire, tile, packed);
    const Width width = width_of(place.bits);
    const int block = block_of(width);
    uint8_t* codes = codes_at(place, tile, packed);
    uint8_t* scales = scales_at(place, tile, packed);
    if (width == INT8) {
        write_codes<INT8, VEC>(held, tile, width, codes, scales);
    } else if (width == INT4) {
        write_codes<INT4, VEC>(held, tile, width, codes, scales);
    } else {
        Held<VEC> turned = held;
        if (!rotated) rotate(turned.value, tile.lane);
        if (width == ROTATED4) {
            write_codes<INT4, VEC>(turned, tile, width, codes, scales);
        } else if (width == INT2) {
            write_codes<INT2, VEC>(turned, tile, width, codes, scales);
        } else if constexpr (VEC <= 8) {
            write_codes<INT3, VEC>(turned, tile, width, codes, scales);
        }
    }
    clear_gap(place, tile, scales + (tile.size + block - 1) / block * 2);
}

}  // namespace zpp
