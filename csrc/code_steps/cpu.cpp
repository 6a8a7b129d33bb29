// Steps of codes on the CPU: the C functions that zeropp/quant/cpu.py calls. Segments are cut into the
// tiles whose steps are packed together, and threads share the tiles.

#include <atomic>

#include "../shared/isa.h"
#include "../shared/threads.h"
#include "cpu_kernels.h"

using namespace zpp;

namespace {

const CodeStepKernels& kernels() {
#ifdef __x86_64__
    if (isa_in_use() == AVX512) return AVX512_CODE_STEPS;
    if (isa_in_use() == AVX2) return AVX2_CODE_STEPS;
#endif
    return PLAIN_CODE_STEPS;
}

int index_of(int64_t reach) { return reach == 4 ? 2 : int(reach) - 1; }

int64_t tiles_of(const Segment& segment) { return (segment.size + STEP_TILE - 1) / STEP_TILE; }

// A piece of one segment: its first element in the segment, and where it is in row and message.
struct Tile {
    const Segment* segment;
    const StepSegment* place;
    int64_t first, size, steps_at;

    bool is_raw() const { return segment->bits == RAW; }
    int64_t element() const { return segment->start + first; }
    int64_t scales() const { return first / BLOCK8 * 2; }
};

// Call body(row, tile) for every tile of all rows, on as many threads as are worth it.
template <class Body>
void share(const Layout& layout, int64_t rows, int64_t bytes, int64_t threads, const Body& body) {
    const StepLayout& steps = StepLayout::after(layout);
    const int64_t count = useful_threads(threads, bytes);
    std::atomic<int64_t> next{0};
    on_threads(count, [&](int64_t) {
        int64_t number = 0, mine = next++;
        for (int64_t row = 0; row < rows; ++row) {
            for (int64_t i = 0; i < layout.count; ++i) {
                const Segment& segment = layout.segments()[i];
                for (int64_t tile = 0; tile < tiles_of(segment); ++tile, ++number) {
                    if (number != mine) continue;
                    const int64_t first = tile * STEP_TILE, rest = segment.size - first;
                    body(row, Tile{&segment, steps.segments() + i, first,
                                   rest < STEP_TILE ? rest : STEP_TILE, steps.bytes(first)});
                    mine = next++;
                }
            }
        }
    });
}

void clear(uint8_t* row, int64_t end) { memset(row + end, 0, size_t(gap_after(end))); }

// Write zeros to the bytes of a message that hold nothing.
void clear_gaps(const Layout& layout, uint8_t* message) {
    const StepLayout& steps = StepLayout::after(layout);
    int64_t raw_end = COUNTS * 4, scales_end = raw_end;
    for (int64_t i = 0; i < layout.count; ++i) {
        const Segment& segment = layout.segments()[i];
        const StepSegment& place = steps.segments()[i];
        if (segment.bits == RAW) {
            raw_end = place.data_at + segment.size * WORD_BYTES[layout.wire];
        } else {
            scales_end = place.scales_at + 2 * segment.blocks();
            clear(message, place.data_at + steps.bytes(segment.size));
        }
    }
    clear(message, raw_end);
    clear(message, scales_end);
}

}  // namespace

extern "C" {

void zpp_code_steps(const Layout* layout, const uint8_t* rows, int64_t type, uint8_t* packed,
                    uint8_t* messages, int64_t count, int64_t threads) {
    const CodeStepKernels& use = kernels();
    const StepLayout& steps = StepLayout::after(*layout);
    const int64_t row_bytes = layout->elements * WORD_BYTES[type];
    for (int64_t row = 0; row < count; ++row) {
        memset(messages + row * steps.num_bytes, 0, COUNTS * 4);
        clear_gaps(*layout, messages + row * steps.num_bytes);
    }
    const int64_t bytes = count * (row_bytes + layout->packed_bytes + steps.num_bytes);
    share(*layout, count, bytes, threads, [=, &use, &steps](int64_t row, const Tile& tile) {
        const uint8_t* values = rows + row * row_bytes + tile.element() * WORD_BYTES[type];
        uint8_t* message = messages + row * steps.num_bytes;
        if (tile.is_raw()) {
            uint8_t* target = message + tile.place->data_at + tile.first * WORD_BYTES[layout->wire];
            return use.convert.from_to[type][layout->wire](values, target, tile.size);
        }
        const uint8_t* held = packed + row * layout->packed_bytes;
        int32_t counts[COUNTS] = {};
        use.find[type][index_of(steps.reach)](
            values, held + tile.segment->data_at + tile.first,
            held + tile.segment->scales_at + tile.scales(),
            message + tile.place->data_at + tile.steps_at,
            message + tile.place->scales_at + tile.scales(), tile.size, counts);
        auto* sums = reinterpret_cast<int32_t*>(message);
        for (int i = 0; i < COUNTS; ++i) {
            if (counts[i]) __atomic_fetch_add(sums + i, counts[i], __ATOMIC_RELAXED);
        }
    });
}

void zpp_apply_code_steps(const Layout* layout, const uint8_t* messages, uint8_t* packed,
                          int64_t count, int64_t threads) {
    const CodeStepKernels& use = kernels();
    const StepLayout& steps = StepLayout::after(*layout);
    const int64_t bytes = count * (2 * layout->packed_bytes + steps.num_bytes);
    share(*layout, count, bytes, threads, [=, &use, &steps](int64_t row, const Tile& tile) {
        const uint8_t* message = messages + row * steps.num_bytes;
        uint8_t* held = packed + row * layout->packed_bytes;
        if (tile.is_raw()) {
            const int64_t width = WORD_BYTES[layout->wire], offset = tile.first * width;
            memcpy(held + tile.segment->data_at + offset, message + tile.place->data_at + offset,
                   size_t(tile.size * width));
            return;
        }
        use.apply[index_of(steps.reach)](
            message + tile.place->data_at + tile.steps_at,
            message + tile.place->scales_at + tile.scales(),
            reinterpret_cast<int8_t*>(held + tile.segment->data_at + tile.first),
            held + tile.segment->scales_at + tile.scales(), tile.size);
    });
}

}  // extern "C"
