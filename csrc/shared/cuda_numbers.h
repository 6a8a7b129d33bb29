// How a lane reads and writes VEC adjacent numbers at once, in accesses of up to 16 bytes.
#pragma once

#include "cuda_tiles.h"

namespace zpp {

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

// VEC numbers of type T in registers.
template <Type T, int VEC> struct Numbers {
    static constexpr int SIZE = int(sizeof(typename Element<T>::Word));
    static constexpr int BYTES = SIZE * VEC;
    static constexpr int PIECE = BYTES < 16 ? BYTES : 16;  // bytes of one access
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

// Whether units of VEC numbers can be read at once from `place`, which has `size` numbers.
template <Type T, int VEC> ZPP_DEVICE bool fits(const uint8_t* place, int size) {
    constexpr uintptr_t PIECE = Numbers<T, VEC>::PIECE;
    return reinterpret_cast<uintptr_t>(place) % PIECE == 0 && size % VEC == 0;
}

template <Type T> ZPP_DEVICE uint32_t read_one(const uint8_t* from) {
    return *reinterpret_cast<const typename Element<T>::Word*>(from);
}

}  // namespace zpp
