// The digits of a tile's steps, packed and unpacked. Compilers vectorize these loops for the
// instruction set that they compile for.
#pragma once

#include "message.h"

namespace zpp {

template <int BASE> ZPP_INLINE uint8_t number_of_3(const uint8_t* digits, int64_t stride) {
    return uint8_t(digits[0] + BASE * digits[stride] + BASE * BASE * digits[2 * stride]);
}

template <int REACH>
ZPP_INLINE void pack_digits(const uint8_t* digits, uint8_t* steps, int64_t lanes) {
    if constexpr (REACH == 1) {
        for (int64_t i = 0; i < lanes; ++i) {
            const uint8_t* d = digits + i;
            steps[i] = uint8_t(d[0] + 3 * d[lanes] + 9 * d[2 * lanes] + 27 * d[3 * lanes] +
                               81 * d[4 * lanes]);
        }
    } else if constexpr (REACH == 4) {
        for (int64_t i = 0; i < lanes; ++i) {
            const uint8_t* d = digits + i;
            const uint16_t number = uint16_t(d[0] + 9 * d[lanes] + 81 * d[2 * lanes] +
                                             729 * d[3 * lanes] + 6561 * d[4 * lanes]);
            memcpy(steps + 2 * i, &number, 2);
        }
    } else {
        uint8_t above[STEP_TILE / 24];
        const uint8_t* last = digits + 21 * lanes;
        for (int64_t i = 0; i < lanes; ++i) above[i] = number_of_3<5>(last + i, lanes);
        for (int byte = 6; byte >= 0; --byte) {
            const uint8_t* d = digits + 3 * byte * lanes;
            for (int64_t i = 0; i < lanes; ++i) {
                above[i] = uint8_t(above[i] + above[i]);
                steps[byte * lanes + i] = uint8_t(number_of_3<5>(d + i, lanes) | (above[i] & 128));
            }
        }
    }
}

template <int BASE, int COUNT>
ZPP_INLINE void split(uint16_t number, uint8_t* digits, int64_t stride) {
    for (int i = 0; i < COUNT; ++i) {
        digits[i * stride] = uint8_t(number % BASE);
        number = uint16_t(number / BASE);
    }
}

template <int REACH>
ZPP_INLINE void unpack_digits(const uint8_t* steps, uint8_t* digits, int64_t lanes) {
    if constexpr (REACH == 1) {
        for (int64_t i = 0; i < lanes; ++i) split<3, 5>(steps[i], digits + i, lanes);
    } else if constexpr (REACH == 4) {
        for (int64_t i = 0; i < lanes; ++i) {
            uint16_t number;
            memcpy(&number, steps + 2 * i, 2);
            split<9, 5>(number, digits + i, lanes);
        }
    } else {
        uint8_t above[STEP_TILE / 24] = {};
        for (int byte = 0; byte < 7; ++byte) {
            const uint8_t* from = steps + byte * lanes;
            uint8_t* to = digits + 3 * byte * lanes;
            for (int64_t i = 0; i < lanes; ++i) {
                above[i] = uint8_t(above[i] | uint8_t(from[i] >> 7) << byte);
                split<5, 3>(from[i] & 127, to + i, lanes);
            }
        }
        for (int64_t i = 0; i < lanes; ++i) split<5, 3>(above[i], digits + 21 * lanes + i, lanes);
    }
}

}  // namespace zpp
