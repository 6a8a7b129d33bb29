// Quantization for any processor.

#include "../shared/vector_plain.h"
#include "cpu_tiles.h"

namespace zpp {
namespace {

struct PlainCodes : Plain {
    // Collects the extremes of floats, compared by their bits.
    class FloatExtremes {
        int32_t most_[WIDTH];
        uint32_t top_[WIDTH];

    public:
        FloatExtremes() {
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

    template <Width W> static void put(const F* unit, uint8_t* codes) {
        float steps[UNIT_SIZE];
        int32_t code[UNIT_SIZE];
        memcpy(steps, unit, sizeof(steps));
        for (int i = 0; i < UNIT_SIZE; ++i) code[i] = code_of(steps[i], Codes<W>::BITS);
        if (W == INT8) {
            for (int i = 0; i < UNIT_SIZE; ++i) codes[i] = uint8_t(code[i]);
            return;
        }
        if (W == INT3) {
            for (int i = 0; i < UNIT_SIZE; i += 8) {
                uint32_t eight = 0;
                for (int k = 0; k < 8; ++k) eight |= uint32_t(code[i + k] + 4) << 3 * k;
                for (int k = 0; k < 3; ++k) codes[i / 8 * 3 + k] = uint8_t(eight >> 8 * k);
            }
            return;
        }
        for (int i = 0; i < UNIT_SIZE / 2; ++i) {
            codes[i] = uint8_t((code[2 * i] & 15) | ((code[2 * i + 1] & 15) << 4));
        }
    }

    static void put_two_bits(const F* unit, F distance, uint8_t* codes) {
        float values[UNIT_SIZE];
        int32_t code[UNIT_SIZE];
        memcpy(values, unit, sizeof(values));
        for (int i = 0; i < UNIT_SIZE; ++i) code[i] = two_bits_of(values[i], distance.lane[0]);
        for (int i = 0; i < UNIT_SIZE / 4; ++i) {
            const int32_t* four = code + 4 * i;
            codes[i] = uint8_t(four[0] | four[1] << 2 | four[2] << 4 | four[3] << 6);
        }
    }

    template <Width W> static void get(const uint8_t* codes, F* unit) {
        float values[UNIT_SIZE];
        if (W == INT8) {
            for (int i = 0; i < UNIT_SIZE; ++i) values[i] = float(int8_t(codes[i]));
        } else if (W == INT3) {
            for (int i = 0; i < UNIT_SIZE; ++i) {
                const uint8_t* three = codes + i / 8 * 3;
                const uint32_t eight = three[0] | three[1] << 8 | uint32_t(three[2]) << 16;
                values[i] = float(2 * int(eight >> 3 * (i % 8) & 7) - 7);
            }
        } else if (W == INT2) {
            for (int i = 0; i < UNIT_SIZE; ++i) {
                values[i] = float(2 * (codes[i / 4] >> 2 * (i % 4) & 3) - 3);
            }
        } else {
            for (int i = 0; i < UNIT_SIZE / 2; ++i) {
                values[2 * i] = float(int((codes[i] & 15) ^ 8) - 8);
                values[2 * i + 1] = float(int((codes[i] >> 4) ^ 8) - 8);
            }
        }
        memcpy(unit, values, sizeof(values));
    }

    static void rotate(F* unit) {
        float values[UNIT_SIZE];
        memcpy(values, unit, sizeof(values));
        for (int stride = ROTATED / 2; stride > 0; stride /= 2) {
            for (int first = 0; first < UNIT_SIZE; first += 2 * stride) {
                for (int i = first; i < first + stride; ++i) {
                    const float sum = values[i] + values[i + stride];
                    values[i + stride] = values[i] - values[i + stride];
                    values[i] = sum;
                }
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

const QuantizeKernels PLAIN_QUANTIZE = quantize_kernels<PlainCodes>();

}  // namespace zpp
