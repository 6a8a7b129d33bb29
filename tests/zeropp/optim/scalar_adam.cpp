// csrc/adam/math.h on one element after another, with any C++ compiler.
#include "adam/call.h"

using namespace zpp;

static float gradient_at(const AdamTensor& tensor, int64_t type, int64_t i) {
    if (type == FP32) return reinterpret_cast<const float*>(tensor.gradient)[i];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(tensor.gradient)[i];
    return type == BF16 ? from_bf16(bits) : from_fp16(bits);
}

static void update(const AdamCall& call, const AdamTensor& tensor, float factor) {
    for (int64_t i = 0; i < tensor.size; ++i) {
        const float gradient = gradient_at(tensor, call.gradient_type, i);
        adam_update(call.scalars, gradient * factor, &tensor.parameter[i], &tensor.mean[i],
                    &tensor.square[i]);
        if (!tensor.copy) continue;
        const float value = tensor.parameter[i];
        reinterpret_cast<uint16_t*>(tensor.copy)[i] =
            call.copy_type == BF16 ? to_bf16(value) : to_fp16(value);
    }
}

extern "C" void zpp_adam(const AdamCall* call) {
    const float factor = call->factor ? *call->factor : 1.0f;
    if (!is_finite(factor)) return;
    for (int64_t i = 0; i < call->count; ++i) update(*call, call->tensors[i], factor);
}
