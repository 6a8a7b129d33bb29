// The loops over one tile. Compilers vectorize them for the instruction set that they compile for.
#pragma once

#include "cpu_kernels.h"
#include "math.h"

namespace zpp {

constexpr int64_t BLOCK = BLOCK8;

#define ZPP_INLINE static inline __attribute__((always_inline))

ZPP_INLINE float scale_at(const uint8_t* scales, int64_t block) {
    uint16_t bits;
    memcpy(&bits, scales + 2 * block, 2);
    return from_bf16(bits);
}

// What a code in steps of one scale becomes in steps of another; 0 if one of them is none.
ZPP_INLINE float remapping(float scale, float new_scale) {
    if (!is_scale(scale) || !is_scale(new_scale)) return 0.0f;
    return bits_of(scale) == bits_of(new_scale) ? 1.0f : scale / new_scale;
}

ZPP_INLINE uint32_t largest_bits(const float* elements, int64_t size) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < size; ++i) {
        const uint32_t magnitude = bits_of(elements[i]) & 0x7FFFFFFFu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

ZPP_INLINE int largest_code(const int8_t* codes, int64_t size) {
    int largest = 0;
    for (int64_t i = 0; i < size; ++i) {
        const int magnitude = codes[i] < 0 ? -codes[i] : codes[i];
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

// How far the codes would be from where they belong with half the scale.
ZPP_INLINE int distance_with_half(const float* elements, const int8_t* codes, float factor,
                                  int64_t size) {
    int largest = 0;
    for (int64_t i = 0; i < size; ++i) {
        const int32_t distance = code_of(elements[i] * factor, 8) - 2 * codes[i];
        const int32_t magnitude = distance < 0 ? -distance : distance;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

template <int REACH> ZPP_INLINE float next_scale(const float* elements, const int8_t* codes, float scale,
                                                int64_t size) {
    const float largest = float_of(largest_bits(elements, size));
    const float magnitude = float_of(bits_of(scale) & 0x7FFFFFFFu);
    const int most = largest_code(codes, size);
    const bool small = is_scale(scale) && largest < SMALL_CODES * magnitude && most < int(SMALL_CODES);
    const bool halves =
        small && distance_with_half(elements, codes, 1.0f / (scale * 0.5f), size) <= REACH;
    return fitting_scale(largest, scale, most, halves, float(REACH));
}

// How many codes are where they do not belong, by how many codes: counted in bytes, 32 at a time.
ZPP_INLINE void count_distances(const int8_t* distances, int64_t size, int32_t* counts) {
    constexpr int64_t LANES = 32;
    uint8_t beyond[4][LANES] = {};
    const int64_t whole = size / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        for (int64_t k = 0; k < LANES; ++k) {
            const int8_t step = distances[i + k];
            beyond[0][k] = uint8_t(beyond[0][k] + ((step > 0) | (step < 0)));
            beyond[1][k] = uint8_t(beyond[1][k] + ((step > 1) | (step < -1)));
            beyond[2][k] = uint8_t(beyond[2][k] + ((step > 2) | (step < -2)));
            beyond[3][k] = uint8_t(beyond[3][k] + ((step > 4) | (step < -4)));
        }
    }
    for (int64_t k = whole; k < size; ++k) {
        const int8_t step = distances[k];
        beyond[0][0] = uint8_t(beyond[0][0] + (step != 0));
        beyond[1][0] = uint8_t(beyond[1][0] + (step > 1 || step < -1));
        beyond[2][0] = uint8_t(beyond[2][0] + (step > 2 || step < -2));
        beyond[3][0] = uint8_t(beyond[3][0] + (step > 4 || step < -4));
    }
    for (int i = 0; i < 4; ++i) {
        for (int64_t k = 0; k < LANES; ++k) counts[i] += beyond[i][k];
    }
}

// Writes step + REACH of each element of a block.
template <int REACH, bool REMAPS>
ZPP_INLINE void find_in_block(const float* elements, const int8_t* codes, float ratio, float factor,
                              uint8_t* digits, int64_t size, int32_t* counts) {
    int8_t distances[BLOCK];
    for (int64_t i = 0; i < size; ++i) {
        const int32_t held = REMAPS ? code_of(float(codes[i]) * ratio, 8) : codes[i];
        const int32_t distance = code_of(elements[i] * factor, 8) - held;
        const int32_t low = distance < -128 ? -128 : distance;
        distances[i] = int8_t(low > 127 ? 127 : low);
    }
    count_distances(distances, size, counts);
    for (int64_t i = 0; i < size; ++i) {
        const int8_t low = distances[i] < -REACH ? int8_t(-REACH) : distances[i];
        digits[i] = uint8_t((low > REACH ? REACH : low) + REACH);
    }
}

template <int REACH> ZPP_INLINE void pack_digits(const uint8_t* digits, uint8_t* steps, int64_t lanes) {
    if constexpr (REACH == 1) {
        for (int64_t i = 0; i < lanes; ++i) {
            const uint8_t* d = digits + i;
            steps[i] = uint8_t(d[0] + 3 * d[lanes] + 9 * d[2 * lanes] + 27 * d[3 * lanes] + 81 * d[4 * lanes]);
        }
    } else if constexpr (REACH == 4) {
        for (int64_t i = 0; i < lanes; ++i) {
            const uint8_t* d = digits + i;
            const uint16_t number = uint16_t(d[0] + 9 * d[lanes] + 81 * d[2 * lanes] +
                                             729 * d[3 * lanes] + 6561 * d[4 * lanes]);
            memcpy(steps + 2 * i, &number, 2);
        }
    } else {
        const uint8_t* last = digits + 21 * lanes;
        for (int byte = 0; byte < 7; ++byte) {
            const uint8_t* d = digits + 3 * byte * lanes;
            for (int64_t i = 0; i < lanes; ++i) {
                const uint8_t number = uint8_t(d[i] + 5 * d[lanes + i] + 25 * d[2 * lanes + i]);
                const uint8_t above = uint8_t(last[i] + 5 * last[lanes + i] + 25 * last[2 * lanes + i]);
                steps[byte * lanes + i] = uint8_t(number | uint8_t(uint8_t(above >> byte) << 7));
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

template <int REACH>
static void find_steps(const float* elements, const int8_t* codes, const uint8_t* scales,
                       uint8_t* steps, uint8_t* new_scales, int64_t size, int32_t* counts) {
    uint8_t digits[STEP_TILE + 24];
    for (int64_t first = 0; first < size; first += BLOCK) {
        const int64_t count = size - first < BLOCK ? size - first : BLOCK;
        const float scale = scale_at(scales, first / BLOCK);
        const float chosen = next_scale<REACH>(elements + first, codes + first, scale, count);
        const uint16_t bits = uint16_t(bits_of(chosen) >> 16), old = uint16_t(bits_of(scale) >> 16);
        memcpy(new_scales + first / BLOCK * 2, &bits, 2);
        counts[4] += bits != old;
        if (!is_scale(chosen)) {
            memset(digits + first, REACH, size_t(count));
            continue;
        }
        const float ratio = remapping(scale, chosen), factor = 1.0f / chosen;
        const float* values = elements + first;
        if (ratio != 1.0f) {
            find_in_block<REACH, true>(values, codes + first, ratio, factor, digits + first, count, counts);
        } else if (count < BLOCK) {
            find_in_block<REACH, false>(values, codes + first, 1.0f, factor, digits + first, count, counts);
        } else {
            find_in_block<REACH, false>(values, codes + first, 1.0f, factor, digits + first, BLOCK, counts);
        }
    }
    const int64_t planes = REACH == 2 ? 24 : 5, lanes = (size + planes - 1) / planes;
    memset(digits + size, REACH, size_t(planes * lanes - size));
    pack_digits<REACH>(digits, steps, lanes);
}

template <int REACH>
static void apply_steps(const uint8_t* steps, const uint8_t* new_scales, int8_t* codes,
                        uint8_t* scales, int64_t size) {
    uint8_t digits[STEP_TILE + 24];
    const int64_t planes = REACH == 2 ? 24 : 5;
    unpack_digits<REACH>(steps, digits, (size + planes - 1) / planes);
    for (int64_t first = 0; first < size; first += BLOCK) {
        const int64_t count = size - first < BLOCK ? size - first : BLOCK;
        const float ratio = remapping(scale_at(scales, first / BLOCK), scale_at(new_scales, first / BLOCK));
        memcpy(scales + first / BLOCK * 2, new_scales + first / BLOCK * 2, 2);
        int8_t* moved = codes + first;
        const uint8_t* by = digits + first;
        if (ratio == 1.0f) {
            for (int64_t i = 0; i < count; ++i) moved[i] = int8_t(moved[i] + by[i] - REACH);
        } else {
            for (int64_t i = 0; i < count; ++i) {
                moved[i] = int8_t(code_of(float(moved[i]) * ratio, 8) + by[i] - REACH);
            }
        }
    }
}

template <class V> constexpr CodeStepKernels code_step_kernels() {
    return {conversions<V>(),
            {find_steps<1>, find_steps<2>, find_steps<4>},
            {apply_steps<1>, apply_steps<2>, apply_steps<4>}};
}

}  // namespace zpp
