// The scales that blocks of codes go on with. zeropp/quant/code_step_reference.py defines the same.
#pragma once

#include "../quantize/math.h"

namespace zpp {

constexpr float MOST_CODES = 129.0f;   // that the largest element may need
constexpr float SMALL_CODES = 58.0f;   // a block that needs no larger ones doubles them
constexpr float GROWN = float(1.25 / 127);  // of the largest element: a scale that was outgrown

ZPP_HD float truncated_to_bf16(float value) { return float_of(bits_of(value) & 0xFFFF0000u); }

ZPP_HD bool is_scale(float value) { return is_finite(value) && value != 0.0f; }

// `halves`: all codes are small, and would be within reach of where they belong with half the scale.
ZPP_HD float fitting_scale(float largest, float scale, int largest_code, bool halves, float reach) {
    if (!is_finite(largest)) return from_bf16(BF16_NAN);
    if (largest < TINY && (largest_code == 0 || !is_scale(scale))) return 0.0f;
    if (!is_scale(scale)) return truncated_to_bf16(largest * (1.0f / reach));
    const float size = float_of(bits_of(scale) & 0x7FFFFFFFu);
    if (largest > MOST_CODES * size) {
        const uint32_t sign = bits_of(scale) & 0x80000000u;
        return float_of(bits_of(truncated_to_bf16(largest * GROWN)) | sign);
    }
    return halves ? scale * 0.5f : scale;
}

// What turns codes in steps of one scale into codes in steps of another; 0 if one of them is none.
ZPP_HD float rescaling(float scale, float new_scale) {
    if (!is_scale(scale) || !is_scale(new_scale)) return 0.0f;
    return bits_of(scale) == bits_of(new_scale) ? 1.0f : scale / new_scale;
}

}  // namespace zpp
