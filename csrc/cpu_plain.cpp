// For any processor: loops over eight floats, which compilers turn into what vectors there are.

#include "tiles.h"

namespace zpp {
namespace {

constexpr int UNIT_SIZE = 32;

struct Plain {
    static constexpr int64_t WIDTH = 8;
    struct F {
        float lane[WIDTH];
    };
    // The extremes of floats, by their bits.
    class Seen {
        int32_t most_[WIDTH];
        uint32_t top_[WIDTH];

    public:
        Seen() {
            for (int i = 0; i < WIDTH; ++i) most_[i] = INT32_MIN, top_[i] = 0;
        }

        void add(const F* unit) {
            for (int i = 0; i < 4 * WIDTH; ++i) {
                const uint32_t word = bits_of(unit[i / WIDTH].lane[i % WIDTH]);
                int32_t& most = most_[i % WIDTH];
                uint32_t& top = top_[i % WIDTH];
                most = int32_t(word) > most ? int32_t(word) : most;
                top = word > top ? word : top;
            }
        }

        void end(uint32_t* high, uint32_t* low) const {
            int32_t most = most_[0];
            *low = top_[0];
            for (int i = 1; i < WIDTH; ++i) {
                most = most_[i] > most ? most_[i] : most;
                *low = top_[i] > *low ? top_[i] : *low;
            }
            *high = uint32_t(most);
        }
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

    static F add_product(F a, F b, F c) {  // the product is exact: a fused one would equal it
        for (int i = 0; i < WIDTH; ++i) c.lane[i] += a.lane[i] * b.lane[i];
        return c;
    }

    template <Type T> static void load(const typename Element<T>::Word* from, F* unit) {
        float values[UNIT_SIZE];
        for (int i = 0; i < UNIT_SIZE; ++i) values[i] = widen<T>(from[i]);
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

    template <Width W> static void put(const F* unit, uint8_t* codes) {
        float steps[UNIT_SIZE];
        int32_t code[UNIT_SIZE];
        memcpy(steps, unit, sizeof(steps));
        for (int i = 0; i < UNIT_SIZE; ++i) code[i] = code_of(steps[i], Codes<W>::BITS);
        if (W == INT8) {
            for (int i = 0; i < UNIT_SIZE; ++i) codes[i] = uint8_t(code[i]);
            return;
        }
        for (int i = 0; i < UNIT_SIZE / 2; ++i) {
            codes[i] = uint8_t((code[2 * i] & 15) | ((code[2 * i + 1] & 15) << 4));
        }
    }

    template <Width W> static void get(const uint8_t* codes, F* unit) {
        float values[UNIT_SIZE];
        if (W == INT8) {
            for (int i = 0; i < UNIT_SIZE; ++i) values[i] = float(int8_t(codes[i]));
        } else {
            for (int i = 0; i < UNIT_SIZE / 2; ++i) {
                values[2 * i] = float(int((codes[i] & 15) ^ 8) - 8);
                values[2 * i + 1] = float(int((codes[i] >> 4) ^ 8) - 8);
            }
        }
        memcpy(unit, values, sizeof(values));
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
};

}  // namespace

const Kernels* plain_kernels() { return kernels_of<Plain>(); }

}  // namespace zpp
