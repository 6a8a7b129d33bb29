// 32 adjacent numbers in the registers of a lane, those that are rotated together: a rotation needs no
// other lane, and a lane's codes are adjacent in memory, 8 to 32 bytes.
#pragma once

#include "cuda_codes.h"

namespace zpp {

constexpr Width ANY = NUM_WIDTHS;  // a width that the table says when the kernel runs

template <Width W> struct Known {
    static constexpr Width width = W;
};

// Call with the width of a segment that is not raw, which is W unless that is ANY.
template <Width W, class Call> ZPP_DEVICE void with_width(int bits, const Call& call) {
    if constexpr (W != ANY) {
        call(Known<W>());
    } else if (bits == 8) {
        call(Known<INT8>());
    } else if (bits == 4) {
        call(Known<INT4>());
    } else if (bits == 3) {
        call(Known<INT3>());
    } else if (bits == 2) {
        call(Known<INT2>());
    } else {
        call(Known<ROTATED4>());
    }
}

static_assert(PER_LANE == ROTATED, "a lane holds what is rotated together");
using Group = float[PER_LANE];

// Multiply by the Hadamard matrix.
ZPP_DEVICE void rotate(Group& value) {
#pragma unroll
    for (int stride = ROTATED / 2; stride > 0; stride /= 2) {
#pragma unroll
        for (int i = 0; i < ROTATED; ++i) {
            if (i & stride) continue;
            const float sum = value[i] + value[i + stride];
            value[i + stride] = value[i] - value[i + stride];
            value[i] = sum;
        }
    }
}

ZPP_DEVICE void unrotate(Group& value) {
    rotate(value);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) value[i] *= 1.0f / ROTATED;
}

// How a lane accesses its codes: PIECES of WORDS each.
template <Width W> struct Pieces {
    static constexpr int BITS = Codes<W>::BITS, BLOCK = Codes<W>::BLOCK;
    static constexpr int WORDS = W == INT3 ? 1 : BITS < 4 ? BITS : 4;
    static constexpr int PIECES = BITS / WORDS, BYTES = 4 * WORDS;
    static constexpr int LANES_OF_BLOCK = BLOCK / PER_LANE;
};

template <Width W> struct Coded {
    uint32_t word[Codes<W>::BITS];
    uint32_t scale;
};

// A lane beyond the end reads what lane 0 does, and the last one of INT8 its first piece twice, so that
// no access depends on a condition: what they then hold is cleared, or not written.
template <Width W>
ZPP_DEVICE void read_codes(const uint8_t* codes, const uint8_t* scales, const Tile& tile,
                           Coded<W>* read) {
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

template <Width W> ZPP_DEVICE void add_codes(const Coded<W>& read, Group& sums) {
    const float scale = from_bf16(uint16_t(read.scale));
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        sums[i] = add_value(code_of_lane<W>(read.word, i), scale, sums[i]);
    }
}

// For sums: what is beyond the end may be anything.
ZPP_DEVICE void clear_beyond(const Tile& tile, Group& value) {
    if (tile.size == WARP_TILE) return;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        if (tile.lane * PER_LANE + i >= tile.size) value[i] = 0.0f;
    }
}

// The extreme of the lane's block, of which rotated elements need the magnitude only.
template <Width W> ZPP_DEVICE float extreme_of_block(const Group& value) {
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

// Write numbers, zeros beyond the end, that are rotated if W is, and the unused bytes after them.
template <Width W>
ZPP_DEVICE void write_codes(const Group& value, const Place& place, const Tile& tile, uint8_t* packed) {
    using P = Pieces<W>;
    const bool inside = tile.lane * PER_LANE < tile.size;
    const uint32_t scale = scale_of(extreme_of_block<W>(value), W);
    const float factor = quick_factor_of(scale, W);
    uint8_t* scales = packed + place.scales_at + tile.first / P::BLOCK * 2;
    if (tile.lane % P::LANES_OF_BLOCK == 0 && inside) {
        reinterpret_cast<uint16_t*>(scales)[tile.lane / P::LANES_OF_BLOCK] = uint16_t(scale);
    }
    const uint32_t usable = mask_of(factor != 0.0f && inside);
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
    } else {
#pragma unroll
        for (int i = 0; i < P::BITS; ++i) {
            words[i] = word_of_codes<P::BITS>([&](int j) { return value[i * (32 / P::BITS) + j]; }, factor);
        }
    }
    const int own = tile.lane * 4 * P::BITS, left = end_of_codes<W>(tile) - own;
    uint8_t* codes = packed + place.data_at + tile.first * P::BITS / 8 + own;
#pragma unroll
    for (int i = 0; i < P::PIECES; ++i) {
        Words<P::BYTES> piece;
#pragma unroll
        for (int j = 0; j < P::WORDS; ++j) piece.word[j] = words[i * P::WORDS + j] & usable;
        if (i * P::BYTES < left) write_words<P::BYTES>(codes + i * P::BYTES, piece);
    }
    clear_gap(place, tile, scales + (tile.size + P::BLOCK - 1) / P::BLOCK * 2);
}

// Numbers of type T as pieces of 16 bytes. Four lanes exchange theirs, so that they access adjacent
// ones: then piece i is the i % 4th lane's, its (lane % 4)th of four.
template <Type T> struct Exchanged {
    static constexpr int SIZE = int(sizeof(typename Element<T>::Word)), VEC = 16 / SIZE;
    static constexpr int PIECES = PER_LANE / VEC;
    Numbers<T, VEC> piece[PIECES];

    static __device__ __forceinline__ int at(int i, int lane) {  // element of the tile
        return (lane / 4 * 4 + i % 4) * PER_LANE + (i / 4 * 4 + lane % 4) * VEC;
    }

    // Between pieces of the lane's own numbers and those that it accesses, in either direction.
    __device__ __forceinline__ void exchange(int lane) {
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
            const bool second = lane & step;
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                if (i & step) continue;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    uint32_t &low = piece[i].word[j], &high = piece[i + step].word[j];
                    const uint32_t given = __shfl_xor_sync(ALL, second ? low : high, step);
                    (second ? low : high) = given;
                }
            }
        }
    }
};

template <Type T> ZPP_DEVICE void read_numbers(const uint8_t* from, const Tile& tile, Group& value) {
    using E = Exchanged<T>;
    E numbers = {};
    if (fits<T, E::VEC>(from, tile.size)) {
#pragma unroll
        for (int i = 0; i < E::PIECES; ++i) {
            const int at = E::at(i, tile.lane);
            if (at < tile.size) numbers.piece[i].read(from + at * E::SIZE);
        }
        numbers.exchange(tile.lane);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) value[i] = numbers.piece[i / E::VEC].get(i % E::VEC);
        return;
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int at = tile.lane * PER_LANE + i;
        value[i] = at < tile.size ? to_float<T>(read_one<T>(from + at * E::SIZE)) : 0.0f;
    }
}

template <Type T> ZPP_DEVICE void write_numbers(const Group& value, const Tile& tile, uint8_t* to) {
    using E = Exchanged<T>;
    if (!fits<T, E::VEC>(to, tile.size)) {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int at = tile.lane * PER_LANE + i;
            if (at < tile.size) write_one(T, value[i], to, at);
        }
        return;
    }
    E numbers;
#pragma unroll
    for (int i = 0; i < PER_LANE; i += 2) {
        numbers.piece[i / E::VEC].set_pair(i % E::VEC, value[i], value[i + 1]);
    }
    numbers.exchange(tile.lane);
#pragma unroll
    for (int i = 0; i < E::PIECES; ++i) {
        const int at = E::at(i, tile.lane);
        if (at < tile.size) numbers.piece[i].write(to + at * E::SIZE);
    }
}

template <Type T> ZPP_DEVICE void add_numbers(const uint8_t* from, const Tile& tile, Group& sums) {
    using E = Exchanged<T>;
    const bool wide = fits<T, E::VEC>(from, tile.size);
#pragma unroll
    for (int i = 0; i < PER_LANE; i += E::VEC) {
        const int at = tile.lane * PER_LANE + i;
        Numbers<T, E::VEC> piece = {};
        if (wide && at < tile.size) piece.read(from + at * E::SIZE);
#pragma unroll
        for (int j = 0; j < E::VEC; ++j) {
            if (!wide && at + j < tile.size) sums[i + j] += read_one(T, from, at + j);
            if (wide) sums[i + j] += piece.get(j);
        }
    }
}

// Raw values of a packed row, in its type, and the unused bytes after them.
ZPP_DEVICE void add_raw(int wire, const uint8_t* from, const Tile& tile, Group& sums) {
    if (wire == BF16) return add_numbers<BF16>(from, tile, sums);
    if (wire == FP16) return add_numbers<FP16>(from, tile, sums);
    add_numbers<FP32>(from, tile, sums);
}
ZPP_DEVICE void write_raw(int wire, const Group& value, const Place& place, const Tile& tile,
                          uint8_t* packed) {
    uint8_t* to = raw_at(place, wire, tile, packed);
    if (wire == BF16) {
        write_numbers<BF16>(value, tile, to);
    } else if (wire == FP16) {
        write_numbers<FP16>(value, tile, to);
    } else {
        write_numbers<FP32>(value, tile, to);
    }
    clear_gap(place, tile, to + tile.size * word_bytes(wire));
}

// Write numbers to their place, which has codes of W, or is what the table says.
template <Width W>
ZPP_DEVICE void put(Group& value, bool rotated, const Place& place, int wire, const Tile& tile,
                    uint8_t* packed) {
    if (W == ANY && place.bits == RAW) {
        if (rotated) unrotate(value);
        return write_raw(wire, value, place, tile, packed);
    }
    with_width<W>(place.bits, [&](auto known) {
        constexpr Width TO = decltype(known)::width;
        if (is_rotated(TO) && !rotated) rotate(value);
        if (!is_rotated(TO) && rotated) unrotate(value);
        write_codes<TO>(value, place, tile, packed);
    });
}

// Terms whose codes a lane requests at once: 64 bytes, or 48 to 64 of them together.
template <Width W> constexpr int AT_ONCE = W == INT8 ? 2 : 4;

// Add terms, so many at a time, while there are so many left.
template <Width W, int COUNT>
ZPP_DEVICE void add_terms(int64_t stride, const Tile& tile, const uint8_t*& codes,
                          const uint8_t*& scales, int* left, Group& sums) {
    for (; *left >= COUNT; *left -= COUNT) {
        Coded<W> read[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            read_codes(codes, scales, tile, &read[i]);
            codes += stride;
            scales += stride;
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) add_codes(read[i], sums);
    }
}

// The sums of a tile's terms, `job.stride` apart. Without a stride there is one, which may be -0.
ZPP_DEVICE void sum_raw(const Job& job, const Tile& tile, const Place& place, const uint8_t* packed,
                        Group& sums) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) sums[i] = job.stride == 0 ? -0.0f : 0.0f;
    const uint8_t* term = raw_at(place, job.table.wire, tile, packed);
    for (int left = int(job.terms); left > 0; --left, term += job.stride) {
        add_raw(job.table.wire, term, tile, sums);
    }
}

// The same one by one, to numbers of a type: for the vectors beside matrices, in few registers.
ZPP_DEVICE void sum_few(const Job& job, const Tile& tile, const Place& place, const uint8_t* packed,
                        int type, uint8_t* to) {
    for (int i = tile.lane; i < tile.size; i += LANES) {
        const uint8_t* term = raw_at(place, job.table.wire, tile, packed);
        float sum = job.stride == 0 ? -0.0f : 0.0f;
        for (int left = int(job.terms); left > 0; --left, term += job.stride) {
            sum += read_one(job.table.wire, term, i);
        }
        write_one(type, sum, to, i);
    }
}

// Those of rotated numbers are rotated.
template <Width W>
ZPP_DEVICE void sum_codes(const Job& job, const Tile& tile, const Place& place,
                          const uint8_t* packed, Group& sums) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) sums[i] = 0.0f;
    int left = int(job.terms);
    with_width<W>(place.bits, [&](auto known) {
        constexpr Width FROM = decltype(known)::width;
        const uint8_t* codes = packed + place.data_at + tile.first * Codes<FROM>::BITS / 8;
        const uint8_t* scales = packed + place.scales_at + tile.first / Codes<FROM>::BLOCK * 2;
        add_terms<FROM, AT_ONCE<FROM>>(job.stride, tile, codes, scales, &left, sums);
        if (AT_ONCE<FROM> > 2) add_terms<FROM, 2>(job.stride, tile, codes, scales, &left, sums);
        add_terms<FROM, 1>(job.stride, tile, codes, scales, &left, sums);
    });
}

}  // namespace zpp
