// How a warp's lanes read and write a tile: numbers, codes and scales.
//
// A lane holds PER_LANE numbers in registers, as units of VEC beside each other; the units of 32
// lanes lie beside each other too, so that an access of a warp is one piece of memory. VEC = 2 is
// for places that no wider access may touch: numbers are read one by one.
//
// All of a tile is asked for before any of it is used. A lane then waits for 32 bytes (codes to be
// decoded) to 128, and the 16 to 40 warps that a multiprocessor's registers hold for 32 to 100 KB.
// To hide 800 ns at the 4.8 TB/s of an H200's 132 multiprocessors takes 29 KB each.
#pragma once

#include "cuda_table.h"

namespace zpp {

template <int VEC> struct Held {
    static constexpr int UNITS = PER_LANE / VEC;
    float value[UNITS][VEC];
};

template <int BYTES> struct alignas(BYTES) Words {
    uint32_t word[BYTES / 4];
};
template <> struct Words<2> {
    uint32_t word[1];
};
template <> struct Words<1> {
    uint32_t word[1];
};

template <int BYTES> ZPP_DEVICE Words<BYTES> read_words(const uint8_t* from) {
    if constexpr (BYTES == 1) {
        return {{*from}};
    } else if constexpr (BYTES == 2) {
        return {{*reinterpret_cast<const uint16_t*>(from)}};
    } else {
        return *reinterpret_cast<const Words<BYTES>*>(from);
    }
}

template <int BYTES> ZPP_DEVICE void write_words(uint8_t* to, const Words<BYTES>& words) {
    if constexpr (BYTES == 1) {
        *to = uint8_t(words.word[0]);
    } else if constexpr (BYTES == 2) {
        *reinterpret_cast<uint16_t*>(to) = uint16_t(words.word[0]);
    } else {
        *reinterpret_cast<Words<BYTES>*>(to) = words;
    }
}

// VEC numbers of type T.
template <Type T, int VEC> struct Numbers {
    static constexpr int SIZE = int(sizeof(typename Element<T>::Word));
    static constexpr int BYTES = SIZE * VEC;
    static constexpr int PIECE = BYTES < 16 ? BYTES : 16;  // of one access
    static constexpr int PIECES = BYTES / PIECE;
    uint32_t word[BYTES / 4];

    __device__ __forceinline__ void read(const uint8_t* from) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const auto piece = read_words<PIECE>(from + i * PIECE);
#pragma unroll
            for (int j = 0; j < PIECE / 4; ++j) word[i * PIECE / 4 + j] = piece.word[j];
        }
    }

    __device__ __forceinline__ void write(uint8_t* to) const {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            Words<PIECE> piece;
#pragma unroll
            for (int j = 0; j < PIECE / 4; ++j) piece.word[j] = word[i * PIECE / 4 + j];
            write_words<PIECE>(to + i * PIECE, piece);
        }
    }

    __device__ __forceinline__ float get(int i) const {
        if constexpr (T == FP32) return float_of(word[i]);
        const uint32_t two = word[i / 2];
        if constexpr (T == BF16) return float_of(i % 2 ? two & 0xFFFF0000u : two << 16);
        return from_fp16(uint16_t(i % 2 ? two >> 16 : two));
    }

    __device__ __forceinline__ void set_pair(int i, float first, float second) {
        if constexpr (T == FP32) {
            word[i] = bits_of(first);
            word[i + 1] = bits_of(second);
        } else {
            word[i / 2] = T == BF16 ? to_bf16_pair(first, second) : to_fp16_pair(first, second);
        }
    }
};

// Whether units of VEC numbers of type T can be read at once, there being `size` of them in a tile.
template <Type T, int VEC> ZPP_DEVICE bool fits(const uint8_t* place, int size) {
    constexpr uintptr_t PIECE = Numbers<T, VEC>::PIECE;
    return reinterpret_cast<uintptr_t>(place) % PIECE == 0 && size % VEC == 0;
}

template <Type T> ZPP_DEVICE uint32_t read_one(const uint8_t* from) {
    return *reinterpret_cast<const typename Element<T>::Word*>(from);
}

// Beyond the end a lane holds zeros, which change no extreme of the others.
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

// For sums: the bytes behind a segment's codes may hold anything.
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

// The raw values of a packed row, in the type `wire`.
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

}  // namespace zpp
