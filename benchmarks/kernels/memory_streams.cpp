// The yardstick of cpu_adam.py: a loop that reads and writes what Adam does and computes next to
// nothing. The mask is 0, which the compiler cannot know, so no number changes.
#include <stdint.h>

#include "../../csrc/shared/threads.h"

namespace {

constexpr int64_t PIECE = 1 << 14;

template <class G, class M>
void pass(const G* __restrict gradients, uint32_t* __restrict parameters, M* __restrict means,
          M* __restrict squares, uint16_t* __restrict copies, int64_t size, uint32_t mask) {
    for (int64_t i = 0; i < size; ++i) {
        const uint32_t word = gradients[i] & mask;
        parameters[i] ^= word;
        means[i] = M(means[i] ^ word);
        squares[i] = M(squares[i] ^ word);
    }
    if (copies == nullptr) return;
    for (int64_t i = 0; i < size; ++i) copies[i] = uint16_t(parameters[i] >> 16);  // from caches
}

template <class G, class M>
void all(const void* gradients, void* parameters, void* means, void* squares, void* copies,
         int64_t size, uint32_t mask, int64_t threads) {
    const int64_t pieces = (size + PIECE - 1) / PIECE;
    zpp::on_threads(threads, [=](int64_t part) {
        for (int64_t at = pieces * part / threads; at < pieces * (part + 1) / threads; ++at) {
            for (int64_t first = at * PIECE; first < (at + 1) * PIECE && first < size;
                 first += 512) {
                const int64_t left = size - first;
                pass((const G*)gradients + first, (uint32_t*)parameters + first,
                     (M*)means + first, (M*)squares + first,
                     copies ? (uint16_t*)copies + first : nullptr, left < 512 ? left : 512, mask);
            }
        }
    });
}

}  // namespace

// Gradients and moments of 2 or 4 bytes; copies of 2, or null.
extern "C" void streams(const void* gradients, void* parameters, void* means, void* squares,
                        void* copies, int64_t size, int64_t gradient_bytes, int64_t moment_bytes,
                        uint32_t mask, int64_t threads) {
    auto* run = gradient_bytes == 4
                    ? (moment_bytes == 4 ? all<uint32_t, uint32_t> : all<uint32_t, uint16_t>)
                    : (moment_bytes == 4 ? all<uint16_t, uint32_t> : all<uint16_t, uint16_t>);
    run(gradients, parameters, means, squares, copies, size, mask, threads);
}
