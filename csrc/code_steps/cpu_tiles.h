// The kernels over one tile, for any vector type V. Each instruction set instantiates them.
//
// Besides what ../shared/convert.h needs, V has int8_of and load_int8; and for the bytes of a unit
// (UNIT = 4 * WIDTH elements) at, zeros, difference (saturated), magnitude (unsigned; 127 may stand
// for 128), count_more, sum and put_digits. The remainder of a segment goes through a zeroed buffer
// of one unit: zeros whose codes are 0 are not counted.
#pragma once

#include "cpu_digits.h"
#include "cpu_kernels.h"
#include "math.h"

namespace zpp {

constexpr int64_t BLOCK = BLOCK8;
constexpr int RESCALED = 4;  // index into the counts

ZPP_INLINE float scale_at(const uint8_t* scale) {
    uint16_t bits;
    memcpy(&bits, scale, 2);
    return from_bf16(bits);
}

template <Type T>
ZPP_INLINE float largest_magnitude(const typename Element<T>::Word* values, int64_t size) {
    using Word = typename Element<T>::Word;
    Word largest = 0;
    for (int64_t i = 0; i < size; ++i) {
        const Word magnitude = Word(values[i] & Word(~Word(0)) >> 1);
        largest = magnitude > largest ? magnitude : largest;
    }
    return to_float<T>(largest);
}

ZPP_INLINE int largest_code(const uint8_t* codes, int64_t size) {
    uint8_t largest = 0;
    for (int64_t i = 0; i < size; ++i) {
        const uint8_t magnitude = codes[i] < 128 ? codes[i] : uint8_t(-codes[i]);
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

// How many codes are more than 0, 1, 2 and 4 steps from where they belong: counted in bytes, each for
// a few lanes of a tile.
template <class V> class DistanceCounts {
    static_assert(STEP_TILE / UNIT<V> < 256, "a byte counts the units of a tile");
    typename V::I beyond_[4] = {V::zeros(), V::zeros(), V::zeros(), V::zeros()};

public:
    void add(typename V::I distances) {
        const auto magnitudes = V::magnitude(distances);
        beyond_[0] = V::count_more(beyond_[0], magnitudes, 0);
        beyond_[1] = V::count_more(beyond_[1], magnitudes, 1);
        beyond_[2] = V::count_more(beyond_[2], magnitudes, 2);
        beyond_[3] = V::count_more(beyond_[3], magnitudes, 4);
    }

    void end(int32_t* counts) const {
        for (int i = 0; i < 4; ++i) counts[i] += V::sum(beyond_[i]);
    }
};

// The elements of a block, and the codes that are held of them.
template <Type T> struct BlockElements {
    const typename Element<T>::Word* values;
    const uint8_t* codes;
    int64_t size;
};

// How a block goes on: `ratio` turns its codes into codes of the new scale, `factor` turns elements
// into steps of it. Without a scale, `factor` is 0.
struct Fit {
    float ratio, factor;
};

// The functions of one block. Their loops are compiled twice: for a whole block, whose size is then a
// constant, and for the rest of a segment.
template <class V, Type T, int REACH> struct StepBlock {
    using Word = typename Element<T>::Word;
    using F = typename V::F;
    using Counts = DistanceCounts<V>;

    ZPP_INLINE void multiply(F* unit, float factor) {
        const F factors = V::all(factor);
        for (int i = 0; i < 4; ++i) unit[i] = V::mul(unit[i], factors);
    }

    template <bool REMAPS>
    ZPP_INLINE void find_in_unit(const Word* values, const uint8_t* codes, Fit fit, uint8_t* digits,
                                 Counts* counts) {
        F unit[4];
        auto held = V::at(codes);
        if (REMAPS) {
            V::load_int8(codes, unit);
            multiply(unit, fit.ratio);
            held = V::int8_of(unit);
        }
        V::template load<T>(values, unit);
        multiply(unit, fit.factor);
        const auto distances = V::difference(V::int8_of(unit), held);
        counts->add(distances);
        V::template put_digits<REACH>(distances, digits);
    }

    template <bool REMAPS>
    ZPP_INLINE void find_in_units(BlockElements<T> from, Fit fit, uint8_t* digits, Counts* counts) {
        const int64_t whole = from.size / UNIT<V> * UNIT<V>, left = from.size - whole;
        for (int64_t i = 0; i < whole; i += UNIT<V>) {
            find_in_unit<REMAPS>(from.values + i, from.codes + i, fit, digits + i, counts);
        }
        if (!left) return;
        Word values[UNIT<V>] = {};
        uint8_t codes[UNIT<V>] = {};
        memcpy(values, from.values + whole, size_t(left) * sizeof(Word));
        memcpy(codes, from.codes + whole, size_t(left));
        find_in_unit<REMAPS>(values, codes, fit, digits + whole, counts);
    }

    // Writes step + REACH of each element, in whole units.
    ZPP_INLINE void find(BlockElements<T> from, Fit fit, uint8_t* digits, Counts* counts) {
        if (fit.factor == 0.0f) {
            memset(digits, REACH, size_t(from.size));
        } else if (fit.ratio != 1.0f) {
            find_in_units<true>(from, fit, digits, counts);
        } else {
            find_in_units<false>(from, fit, digits, counts);
        }
    }

    // Whether all codes would be within reach of where they belong with half the scale.
    static bool reaches_half(BlockElements<T> from, float scale) {
        uint8_t digits[BLOCK];
        Counts distances;
        find_in_units<true>(from, {2.0f, 1.0f / (scale * 0.5f)}, digits, &distances);
        int32_t counts[4] = {};
        distances.end(counts);
        return counts[REACH == 4 ? 3 : REACH] == 0;
    }

    // Codes are looked at only if the elements are small: seldom.
    ZPP_INLINE float next_scale(BlockElements<T> from, float scale) {
        const float largest = largest_magnitude<T>(from.values, from.size);
        const float magnitude = float_of(bits_of(scale) & 0x7FFFFFFFu);
        const bool small = is_scale(scale) && largest < SMALL_CODES * magnitude;
        if (!small && !(largest < TINY)) return fitting_scale(largest, scale, 0, false, float(REACH));
        const int most = largest_code(from.codes, from.size);
        const bool halves = small && most < int(SMALL_CODES) && reaches_half(from, scale);
        return fitting_scale(largest, scale, most, halves, float(REACH));
    }

    // Writes the new scale; adds to `rescaled` if it is another one.
    ZPP_INLINE Fit fit(BlockElements<T> from, const uint8_t* scale, uint8_t* new_scale,
                       int32_t* rescaled) {
        const float old = scale_at(scale), next = next_scale(from, old);
        const uint16_t bits = uint16_t(bits_of(next) >> 16);
        memcpy(new_scale, &bits, 2);
        *rescaled += bits != uint16_t(bits_of(old) >> 16);
        return {rescaling(old, next), is_scale(next) ? 1.0f / next : 0.0f};
    }
};

template <class V, Type T, int REACH>
static void find_steps(const void* from, const uint8_t* codes, const uint8_t* scales, uint8_t* steps,
                       uint8_t* new_scales, int64_t size, int32_t* counts) {
    using B = StepBlock<V, T, REACH>;
    const auto* values = static_cast<const typename B::Word*>(from);
    const auto block = [=](int64_t i, int64_t elements) {
        return BlockElements<T>{values + i * BLOCK, codes + i * BLOCK, elements};
    };
    const int64_t whole = size / BLOCK, left = size % BLOCK;
    Fit fits[STEP_TILE / BLOCK];  // all of them first, so that no block waits for its division
    for (int64_t i = 0; i < whole; ++i) {
        fits[i] = B::fit(block(i, BLOCK), scales + 2 * i, new_scales + 2 * i, counts + RESCALED);
    }
    if (left) {
        fits[whole] = B::fit(block(whole, left), scales + 2 * whole, new_scales + 2 * whole,
                             counts + RESCALED);
    }
    alignas(64) uint8_t digits[STEP_TILE + UNIT<V>];
    DistanceCounts<V> distances;
    for (int64_t i = 0; i < whole; ++i) {
        B::find(block(i, BLOCK), fits[i], digits + i * BLOCK, &distances);
    }
    if (left) B::find(block(whole, left), fits[whole], digits + whole * BLOCK, &distances);
    distances.end(counts);
    constexpr int64_t planes = planes_of(REACH);
    const int64_t lanes = (size + planes - 1) / planes;
    memset(digits + size, REACH, size_t(planes * lanes - size));
    pack_digits<REACH>(digits, steps, lanes);
}

template <int REACH>
static void apply_steps(const uint8_t* steps, const uint8_t* new_scales, int8_t* codes,
                        uint8_t* scales, int64_t size) {
    constexpr int64_t planes = planes_of(REACH);
    uint8_t digits[STEP_TILE + planes];
    unpack_digits<REACH>(steps, digits, (size + planes - 1) / planes);
    for (int64_t first = 0; first < size; first += BLOCK) {
        const int64_t count = size - first < BLOCK ? size - first : BLOCK;
        uint8_t* scale = scales + first / BLOCK * 2;
        const uint8_t* new_scale = new_scales + first / BLOCK * 2;
        const float ratio = rescaling(scale_at(scale), scale_at(new_scale));
        memcpy(scale, new_scale, 2);
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
    return {
        conversions<V>(),
        {{find_steps<V, BF16, 1>, find_steps<V, BF16, 2>, find_steps<V, BF16, 4>},
         {find_steps<V, FP16, 1>, find_steps<V, FP16, 2>, find_steps<V, FP16, 4>},
         {find_steps<V, FP32, 1>, find_steps<V, FP32, 2>, find_steps<V, FP32, 4>}},
        {apply_steps<1>, apply_steps<2>, apply_steps<4>},
    };
}

}  // namespace zpp
