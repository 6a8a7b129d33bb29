// Steps of codes for any processor.

#include "../shared/vector_plain.h"
#include "cpu_tiles.h"

namespace zpp {
namespace {

struct PlainSteps : Plain {
    struct I {
        int8_t lane[UNIT_SIZE];
    };

    static I at(const uint8_t* from) {
        I out;
        memcpy(&out, from, sizeof(out));
        return out;
    }

    static I int8_of(const F* unit) {
        float steps[UNIT_SIZE];
        I out;
        memcpy(steps, unit, sizeof(steps));
        for (int i = 0; i < UNIT_SIZE; ++i) out.lane[i] = int8_t(code_of(steps[i], 8));
        return out;
    }

    static void load_int8(const uint8_t* from, F* unit) {
        float values[UNIT_SIZE];
        for (int i = 0; i < UNIT_SIZE; ++i) values[i] = float(int8_t(from[i]));
        memcpy(unit, values, sizeof(values));
    }

    static I zeros() { return {}; }

    static I difference(I a, I b) {
        for (int i = 0; i < UNIT_SIZE; ++i) {
            const int distance = a.lane[i] - b.lane[i];
            const int low = distance < -128 ? -128 : distance;
            a.lane[i] = int8_t(low > 127 ? 127 : low);
        }
        return a;
    }

    static I magnitude(I value) {
        for (int i = 0; i < UNIT_SIZE; ++i) {
            const int8_t distance = value.lane[i];
            value.lane[i] = distance < 0 ? int8_t(-(distance < -127 ? -127 : distance)) : distance;
        }
        return value;
    }

    static I count_more(I counts, I magnitudes, uint8_t than) {
        for (int i = 0; i < UNIT_SIZE; ++i) {
            counts.lane[i] = int8_t(counts.lane[i] + (magnitudes.lane[i] > than));
        }
        return counts;
    }

    static int sum(I counts) {
        int total = 0;
        for (int i = 0; i < UNIT_SIZE; ++i) total += uint8_t(counts.lane[i]);
        return total;
    }

    template <int REACH> static void put_digits(I distances, uint8_t* digits) {
        for (int i = 0; i < UNIT_SIZE; ++i) {
            const int8_t low = distances.lane[i] < -REACH ? int8_t(-REACH) : distances.lane[i];
            digits[i] = uint8_t((low > REACH ? REACH : low) + REACH);
        }
    }
};

}  // namespace

const CodeStepKernels PLAIN_CODE_STEPS = code_step_kernels<PlainSteps>();

}  // namespace zpp
