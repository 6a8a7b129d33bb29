// Vectors of eight floats for any processor: loops that compilers vectorize.
#pragma once

#include "numbers.h"

namespace zpp {

struct Plain {
    static constexpr int64_t WIDTH = 8;
    static constexpr int UNIT_SIZE = 4 * WIDTH;  // elements of a unit, which is four vectors
    struct F {
        float lane[WIDTH];
    };
    static_assert(4 * sizeof(F) == UNIT_SIZE * sizeof(float), "four vectors are one array");

    static F all(float value) {
        F out;
        for (int i = 0; i < WIDTH; ++i) out.lane[i] = value;
        return out;
    }

    static F mul(F a, F b) {
        for (int i = 0; i < WIDTH; ++i) a.lane[i] *= b.lane[i];
        return a;
    }

    static F add_product(F a, F b, F c) {  // products are exact here, so fusing changes nothing
        for (int i = 0; i < WIDTH; ++i) c.lane[i] += a.lane[i] * b.lane[i];
        return c;
    }

    template <Type T> static void load(const typename Element<T>::Word* from, F* unit) {
        float values[UNIT_SIZE];
        for (int i = 0; i < UNIT_SIZE; ++i) values[i] = to_float<T>(from[i]);
        memcpy(unit, values, sizeof(values));
    }

    template <Type T> static void store(const F* unit, typename Element<T>::Word* to) {
        using Word = typename Element<T>::Word;
        float values[UNIT_SIZE];
        memcpy(values, unit, sizeof(values));
        for (int i = 0; i < UNIT_SIZE; ++i) {
            to[i] = T == BF16   ? Word(to_bf16(values[i]))
                    : T == FP16 ? Word(to_fp16(values[i]))
                                : Word(bits_of(values[i]));
        }
    }
};

}  // namespace zpp
