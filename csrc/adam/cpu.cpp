// Adam on the CPU, on many tensors: unscaling, clipping, the update and the 16-bit copy in one pass
// over memory.
//
// Tensors are cut into pieces. Each thread takes the next piece and updates it chunk by chunk.
// Conversions from and to 16 bits go through buffers that stay in the level-1 cache, so that each
// array is read and written once.

#include <atomic>

#include "../shared/isa.h"
#include "../shared/threads.h"
#include "call.h"
#include "cpu_kernels.h"

using namespace zpp;

namespace {

constexpr int64_t PIECE = 1 << 16;  // elements; with fewer, memory streams start again too often
constexpr int64_t CHUNK_SIZE = 256;  // of 128, 192, 256, 512 and 1024 the fastest with bf16 moments

const AdamKernels& kernels() {
#ifdef __x86_64__
    if (isa_in_use() == AVX512) return AVX512_ADAM;
    if (isa_in_use() == AVX2) return AVX2_ADAM;
#endif
    return PLAIN_ADAM;
}

// Finds pieces by their number. Numbers must not decrease from call to call.
class Pieces {
    const AdamCall& call_;
    int64_t tensor_ = 0;
    int64_t pieces_before_ = 0;  // of the tensors before this one
    uint32_t position_ = 0;      // of this tensor's first element among all of the call's

    int64_t of_tensor() const { return (call_.tensors[tensor_].size + PIECE - 1) / PIECE; }

public:
    explicit Pieces(const AdamCall& call) : call_(call) {}

    // Returns false beyond the last piece. `position` is that of the piece's first element.
    bool find(int64_t number, AdamTensor* piece, uint32_t* position);
};

uint8_t* advanced(uint8_t* array, int64_t type, int64_t elements) {
    return array ? array + elements * WORD_BYTES[type] : nullptr;
}
float* advanced(float* array, int64_t type, int64_t elements) {
    return reinterpret_cast<float*>(advanced(reinterpret_cast<uint8_t*>(array), type, elements));
}

AdamTensor part_of(const AdamCall& call, const AdamTensor& whole, int64_t first, int64_t most) {
    const int64_t left = whole.size - first;
    return AdamTensor{
        whole.gradient + first * WORD_BYTES[call.gradient_type],
        whole.parameter + first,
        advanced(whole.mean, call.moment_type, first),
        advanced(whole.square, call.moment_type, first),
        advanced(whole.copy, call.copy_type, first),
        left < most ? left : most,
    };
}

bool Pieces::find(int64_t number, AdamTensor* piece, uint32_t* position) {
    for (; tensor_ < call_.count; ++tensor_) {
        const AdamTensor& tensor = call_.tensors[tensor_];
        const int64_t first = (number - pieces_before_) * PIECE;
        if (first < tensor.size) {
            *piece = part_of(call_, tensor, first, PIECE);
            *position = position_ + uint32_t(first);
            return true;
        }
        pieces_before_ += of_tensor();
        position_ += uint32_t(tensor.size);
    }
    return false;
}

void update_bf16_moments(const AdamScalars& scalars, float factor, const float* gradients,
                         const AdamTensor& chunk, uint32_t position) {
    const AdamKernels& use = kernels();
    alignas(64) float means[CHUNK_SIZE], squares[CHUNK_SIZE];
    auto* mean_words = reinterpret_cast<uint16_t*>(chunk.mean);
    auto* square_words = reinterpret_cast<uint16_t*>(chunk.square);
    use.convert.from_to[BF16][FP32](mean_words, means, chunk.size);
    use.convert.from_to[BF16][FP32](square_words, squares, chunk.size);
    use.update(scalars, factor, gradients, chunk.parameter, means, squares, chunk.size);
    use.round_moments(scalars.keys, position, means, squares, mean_words, square_words,
                      chunk.size);
}

void update(const AdamCall& call, float factor, const AdamTensor& chunk, uint32_t position) {
    const AdamKernels& use = kernels();
    alignas(64) float fp32_gradients[CHUNK_SIZE];
    const auto* gradients = reinterpret_cast<const float*>(chunk.gradient);
    if (call.gradient_type != FP32) {
        use.convert.from_to[call.gradient_type][FP32](chunk.gradient, fp32_gradients, chunk.size);
        gradients = fp32_gradients;
    }
    if (call.moment_type == FP32) {
        use.update(call.scalars, factor, gradients, chunk.parameter, chunk.mean, chunk.square,
                   chunk.size);
    } else {
        update_bf16_moments(call.scalars, factor, gradients, chunk, position);
    }
    if (chunk.copy) {
        use.convert.from_to[FP32][call.copy_type](chunk.parameter, chunk.copy, chunk.size);
    }
}

int64_t bytes_of(const AdamCall& call) {
    int64_t elements = 0;
    for (int64_t i = 0; i < call.count; ++i) elements += call.tensors[i].size;
    return elements * (WORD_BYTES[call.gradient_type] + 8 + 4 * WORD_BYTES[call.moment_type]);
}

}  // namespace

extern "C" {

// Writes nothing if the factor is not finite.
void zpp_adam(const AdamCall* call, int64_t threads) {
    const float factor = call->factor ? *call->factor : 1.0f;
    if (!is_finite(factor)) return;
    const bool converts = call->gradient_type != FP32 || call->moment_type != FP32;
    std::atomic<int64_t> next{0};
    on_threads(useful_threads(threads, bytes_of(*call)), [&](int64_t) {
        Pieces pieces(*call);
        AdamTensor piece;
        uint32_t position;
        while (pieces.find(next.fetch_add(1, std::memory_order_relaxed), &piece, &position)) {
            const int64_t step = converts || piece.copy ? CHUNK_SIZE : PIECE;
            for (int64_t first = 0; first < piece.size; first += step) {
                update(*call, factor, part_of(*call, piece, first, step),
                       position + uint32_t(first));
            }
        }
    });
}

}  // extern "C"
