// For any processor: loops over eight floats, which compilers turn into what vectors there are.

#include "tiles.h"

namespace zpp {
namespace {

struct Plain {
    static constexpr int64_t WIDTH = 8;
    struct F {
        float lane[WIDTH];
    };

    static F all(float value) {
        F out;
        for (int i = 0; i < WIDTH; ++i) out.lane[i] = value;
        return out;
    }

    static F mul(F a, F b) {
        for (int i = 0; i < WIDTH; ++i) a.lane[i] *= b.lane[i];
        return a;
    }

    static F add_product(F a, F b, F c) {  // the product is exact: a fused one would equal it
        for (int i = 0; i < WIDTH; ++i) c.lane[i] += a.lane[i] * b.lane[i];
        return c;
    }

    template <Type T> static void load(const typename Element<T>::Word* from, F* unit) {
        for (int i = 0; i < 4 * WIDTH; ++i) unit[i / WIDTH].lane[i % WIDTH] = widen<T>(from[i]);
    }

    template <Type T> static void store(const F* unit, typename Element<T>::Word* to) {
        using Word = typename Element<T>::Word;
        for (int i = 0; i < 4 * WIDTH; ++i) {
            const float value = unit[i / WIDTH].lane[i % WIDTH];
            to[i] = T == BF16   ? Word(to_bf16(value))
                    : T == FP16 ? Word(to_fp16(value))
                                : Word(bits_of(value));
        }
    }

    template <Width W> static void put(const F* unit, uint8_t* codes) {
        int8_t code[4 * WIDTH];
        for (int i = 0; i < 4 * WIDTH; ++i) {
            code[i] = int8_t(code_of(unit[i / WIDTH].lane[i % WIDTH], Codes<W>::BITS));
        }
        if (W == INT8) {
            memcpy(codes, code, sizeof(code));
            return;
        }
        for (int i = 0; i < 2 * WIDTH; ++i) {
            codes[i] = uint8_t((code[2 * i] & 15) | ((code[2 * i + 1] & 15) << 4));
        }
    }

    template <Width W> static void get(const uint8_t* codes, F* unit) {
        int8_t code[4 * WIDTH];
        if (W == INT8) {
            memcpy(code, codes, sizeof(code));
        } else {
            for (int i = 0; i < 2 * WIDTH; ++i) {
                code[2 * i] = int8_t(((codes[i] & 15) ^ 8) - 8);
                code[2 * i + 1] = int8_t(((codes[i] >> 4) ^ 8) - 8);
            }
        }
        for (int i = 0; i < 4 * WIDTH; ++i) unit[i / WIDTH].lane[i % WIDTH] = float(code[i]);
    }

    static void extremes(const uint16_t* from, int64_t size, uint32_t* high, uint32_t* low) {
        int16_t most = INT16_MIN;
        uint16_t top = 0;
        for (int64_t i = 0; i < size; ++i) {
            const int16_t word = int16_t(from[i]);
            most = word > most ? word : most;
            top = from[i] > top ? from[i] : top;
        }
        *high = uint16_t(most);
        *low = top;
    }

    static void extremes(const uint32_t* from, int64_t size, uint32_t* high, uint32_t* low) {
        int32_t most = INT32_MIN;
        uint32_t top = 0;
        for (int64_t i = 0; i < size; ++i) {
            const int32_t word = int32_t(from[i]);
            most = word > most ? word : most;
            top = from[i] > top ? from[i] : top;
        }
        *high = uint32_t(most);
        *low = top;
    }
};

}  // namespace

const Kernels* plain_kernels() { return kernels_of<Plain>(); }

}  // namespace zpp
