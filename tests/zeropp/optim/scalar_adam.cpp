// csrc/adam_math.h, one element after another, as any C++ compiler makes it.
#include "format.h"

using namespace zpp;

static float gradient_at(const AdamTensor& one, int64_t type, int64_t i) {
    if (type == FP32) return reinterpret_cast<const float*>(one.gradient)[i];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(one.gradient)[i];
    return type == BF16 ? from_bf16(bits) : from_fp16(bits);
}

static void update(const AdamCall& call, const AdamTensor& one, float factor) {
    for (int64_t i = 0; i < one.size; ++i) {
        const float gradient = gradient_at(one, call.gradient_type, i);
        adam_update(call.scalars, gradient * factor, &one.parameter[i], &one.mean[i],
                    &one.square[i]);
        if (!one.copy) continue;
        const float value = one.parameter[i];
        reinterpret_cast<uint16_t*>(one.copy)[i] =
            call.copy_type == BF16 ? to_bf16(value) : to_fp16(value);
    }
}

extern "C" void zpp_adam(const AdamCall* call) {
    const float factor = call->factor ? *call->factor : 1.0f;
    if (!is_finite(factor)) return;
    for (int64_t i = 0; i < call->count; ++i) update(*call, call->tensors[i], factor);
}
