// Adam on many tensors: unscaling, clipping, the update and the 16-bit copy in one pass over memory.
//
// A piece of a tensor is taken by whichever thread is free, and updated chunk by chunk. Numbers of 16
// bits become fp32 in buffers that never leave the level-1 cache, and so does what is rounded: memory
// sees each array once.

#include <atomic>

#include "kernels.h"
#include "threads.h"

using namespace zpp;

namespace {

constexpr int64_t PIECE = 1 << 16;  // elements; with fewer, streams of memory begin anew too often
constexpr int64_t CHUNK_SIZE = 256;  // of 128, 192, 256, 512 and 1024 the fastest with bf16 moments

// Which piece a number stands for; numbers only rise.
class Pieces {
    const AdamCall& call_;
    int64_t tensor_ = 0, before_ = 0;  // pieces of the tensors before
    uint32_t place_ = 0;               // of the tensor's first element among the call's

    int64_t of_tensor() const { return (call_.tensors[tensor_].size + PIECE - 1) / PIECE; }

public:
    explicit Pieces(const AdamCall& call) : call_(call) {}

    // False beyond the last one. `place`: of the piece's first element.
    bool find(int64_t number, AdamTensor* piece, uint32_t* place);
};

uint8_t* moved(uint8_t* array, int64_t type, int64_t elements) {
    return array ? array + elements * WORD_BYTES[type] : nullptr;
}
float* moved(float* array, int64_t type, int64_t elements) {
    return reinterpret_cast<float*>(moved(reinterpret_cast<uint8_t*>(array), type, elements));
}

AdamTensor part_of(const AdamCall& call, const AdamTensor& whole, int64_t first, int64_t most) {
    const int64_t left = whole.size - first;
    return AdamTensor{
        whole.gradient + first * WORD_BYTES[call.gradient_type],
        whole.parameter + first,
        moved(whole.mean, call.moment_type, first),
        moved(whole.square, call.moment_type, first),
        moved(whole.copy, call.copy_type, first),
        left < most ? left : most,
    };
}

bool Pieces::find(int64_t number, AdamTensor* piece, uint32_t* place) {
    for (; tensor_ < call_.count; ++tensor_) {
        const AdamTensor& tensor = call_.tensors[tensor_];
        const int64_t first = (number - before_) * PIECE;
        if (first < tensor.size) {
            *piece = part_of(call_, tensor, first, PIECE);
            *place = place_ + uint32_t(first);
            return true;
        }
        before_ += of_tensor();
        place_ += uint32_t(tensor.size);
    }
    return false;
}

void update_drawn(const Kernels& use, const AdamScalars& with, float factor,
                  const float* gradients, const AdamTensor& chunk, uint32_t place) {
    alignas(64) float means[CHUNK_SIZE], squares[CHUNK_SIZE];
    auto* mean_words = reinterpret_cast<uint16_t*>(chunk.mean);
    auto* square_words = reinterpret_cast<uint16_t*>(chunk.square);
    use.convert[BF16][FP32](mean_words, means, chunk.size);
    use.convert[BF16][FP32](square_words, squares, chunk.size);
    use.adam(with, factor, gradients, chunk.parameter, means, squares, chunk.size);
    use.draw(with.keys, place, means, squares, mean_words, square_words, chunk.size);
}

void update(const Kernels& use, const AdamCall& call, float factor, const AdamTensor& chunk,
            uint32_t place) {
    alignas(64) float widened[CHUNK_SIZE];
    const auto* gradients = reinterpret_cast<const float*>(chunk.gradient);
    if (call.gradient_type != FP32) {
        use.convert[call.gradient_type][FP32](chunk.gradient, widened, chunk.size);
        gradients = widened;
    }
    if (call.moment_type == FP32) {
        use.adam(call.scalars, factor, gradients, chunk.parameter, chunk.mean, chunk.square,
                 chunk.size);
    } else {
        update_drawn(use, call.scalars, factor, gradients, chunk, place);
    }
    if (chunk.copy) use.convert[FP32][call.copy_type](chunk.parameter, chunk.copy, chunk.size);
}

int64_t bytes_of(const AdamCall& call) {
    int64_t elements = 0;
    for (int64_t i = 0; i < call.count; ++i) elements += call.tensors[i].size;
    return elements * (WORD_BYTES[call.gradient_type] + 8 + 4 * WORD_BYTES[call.moment_type]);
}

}  // namespace

extern "C" {

// Where the factor is not finite, nothing is written.
void zpp_adam(const AdamCall* call, int64_t threads) {
    const float factor = call->factor ? *call->factor : 1.0f;
    if (!is_finite(factor)) return;
    const Kernels& use = kernels();
    const bool converts = call->gradient_type != FP32 || call->moment_type != FP32;
    std::atomic<int64_t> next{0};
    on_threads(useful_threads(threads, bytes_of(*call)), [&](int64_t) {
        Pieces pieces(*call);
        AdamTensor piece;
        uint32_t place;
        while (pieces.find(next.fetch_add(1, std::memory_order_relaxed), &piece, &place)) {
            const int64_t step = converts || piece.copy ? CHUNK_SIZE : PIECE;
            for (int64_t first = 0; first < piece.size; first += step) {
                update(use, *call, factor, part_of(*call, piece, first, step),
                       place + uint32_t(first));
            }
        }
    });
}

}  // extern "C"
