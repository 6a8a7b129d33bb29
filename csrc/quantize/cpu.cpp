// Quantization on the CPU: the C functions that zeropp/quant/cpu.py calls. Rows are cut into tiles,
// and threads share the tiles.

#include "../shared/isa.h"
#include "../shared/threads.h"
#include "cpu_kernels.h"
#include "packed_row.h"

using namespace zpp;

namespace {

int64_t tiles_of(const Segment& segment) { return (segment.size + TILE - 1) / TILE; }

int64_t tiles_of(const Layout& layout) {
    int64_t all = 0;
    for (int64_t i = 0; i < layout.count; ++i) all += tiles_of(layout.segments()[i]);
    return all;
}

const QuantizeKernels& kernels() {
#ifdef __x86_64__
    if (isa_in_use() == AVX512) return AVX512_QUANTIZE;
    if (isa_in_use() == AVX2) return AVX2_QUANTIZE;
#endif
    return PLAIN_QUANTIZE;
}

// A piece of one segment of one packed row.
struct Tile {
    int64_t row, first, size;  // `first` counts elements from the start of the segment
    const Segment* segment;

    uint8_t* codes(uint8_t* packed) const {
        return packed + segment->data_at + first * segment->code_bits() / 8;
    }
    uint8_t* scales(uint8_t* packed) const {
        return packed + segment->scales_at + first / segment->block() * 2;
    }
    uint8_t* raw(uint8_t* packed, int64_t wire) const {
        return packed + segment->data_at + first * WORD_BYTES[wire];
    }
    int64_t element() const { return segment->start + first; }
    bool is_first_of_row(const Layout& layout) const {
        return first == 0 && segment == layout.segments();
    }
};

// Call body(tile) for the tiles `from` ... `to` - 1 of all rows.
template <class Body>
void walk(const Layout& layout, int64_t from, int64_t to, const Body& body) {
    const int64_t per_row = tiles_of(layout);
    int64_t row = from / per_row, skip = from % per_row;
    for (int64_t left = to - from; left > 0; ++row) {
        for (int64_t i = 0; i < layout.count && left > 0; ++i) {
            const Segment& segment = layout.segments()[i];
            const int64_t tiles = tiles_of(segment);
            for (int64_t tile = skip < tiles ? skip : tiles; tile < tiles && left > 0; ++tile) {
                const int64_t first = tile * TILE;
                const int64_t rest = segment.size - first;
                body(Tile{row, first, rest < TILE ? rest : TILE, &segment});
                --left;
            }
            skip = skip > tiles ? skip - tiles : 0;
        }
    }
}

// Call body(tile) for all tiles, on as many threads as are worth it for so many bytes.
template <class Body>
void share(const Layout& layout, int64_t rows, int64_t bytes, int64_t threads, const Body& body) {
    const int64_t tiles = rows * tiles_of(layout);
    if (tiles == 0) return;
    int64_t count = useful_threads(threads, bytes);
    if (count > tiles) count = tiles;
    on_threads(count, [&](int64_t part) {
        walk(layout, tiles * part / count, tiles * (part + 1) / count, body);
    });
}

// Write zeros to the bytes that hold no value, scale or code.
void clear_gaps(const Layout& layout, uint8_t* packed) {
    int64_t raw_end = 0, scales_end = 0;
    for (int64_t i = 0; i < layout.count; ++i) {
        const Segment& segment = layout.segments()[i];
        if (segment.bits == RAW) {
            raw_end = segment.raw_end(layout.wire);
            continue;
        }
        scales_end = segment.scales_end();
        memset(packed + segment.codes_end(), 0, size_t(gap_after(segment.codes_end())));
    }
    memset(packed + raw_end, 0, size_t(gap_after(raw_end)));
    memset(packed + scales_end, 0, size_t(gap_after(scales_end)));
}

void put(const QuantizeKernels& use, const Layout& layout, const Tile& tile, const void* values, int type,
         uint8_t* packed) {
    const Segment& segment = *tile.segment;
    if (tile.is_first_of_row(layout)) clear_gaps(layout, packed);
    if (segment.bits == RAW) {
        use.convert.from_to[type][layout.wire](values, tile.raw(packed, layout.wire), tile.size);
    } else {
        use.of[segment.width()].quantize[type](values, tile.codes(packed), tile.scales(packed),
                                               tile.size);
    }
}

// Fill sums with the sum of terms that are `stride` bytes apart, added in order; rotated, if the
// segment is. If `extremes` is not null, fill it with those of the sums; raw tiles have none, nor has
// what codes for odd numbers stand for.
void add_up(const QuantizeKernels& use, const Layout& layout, const Tile& tile, uint8_t* packed,
            int64_t stride, int64_t terms, float* sums, Extremes* extremes) {
    const Segment& segment = *tile.segment;
    if (segment.bits == RAW) {
        memset(sums, 0, size_t(tile.size) * 4);
        for (int64_t term = 0; term < terms; ++term) {
            const uint8_t* values = tile.raw(packed + term * stride, layout.wire);
            use.sum_raw[layout.wire](values, sums, tile.size);
        }
        return;
    }
    for (int64_t term = 0; term < terms; term += MAX_TERMS) {
        Coded batch[MAX_TERMS];
        const int count = int(terms - term < MAX_TERMS ? terms - term : MAX_TERMS);
        for (int i = 0; i < count; ++i) {
            uint8_t* row = packed + (term + i) * stride;
            batch[i] = Coded{tile.codes(row), tile.scales(row)};
        }
        Extremes* of_batch = term + count == terms ? extremes : nullptr;
        use.of[segment.width()].sum(batch, count, term == 0, sums, tile.size, of_batch);
    }
}

// Whether extremes of a segment's sums are found while terms are added up.
bool has_extremes(const Segment& segment) {
    return segment.bits != RAW && !is_odd(segment.width());
}

// The row of values of a packed row: n*fold+r for packed row r*N+n, N = rows / fold.
int64_t unfolded(int64_t packed_row, int64_t rows, int64_t fold) {
    const int64_t slices = rows / fold;
    return packed_row % slices * fold + packed_row / slices;
}

}  // namespace

extern "C" {

void zpp_quantize(const Layout* layout, const uint8_t* rows, int64_t type, uint8_t* packed,
                  int64_t count, int64_t fold, int64_t threads) {
    const QuantizeKernels& use = kernels();
    const int64_t row_bytes = layout->elements * WORD_BYTES[type];
    const int64_t bytes = count * (row_bytes + layout->packed_bytes);
    share(*layout, count, bytes, threads, [=, &use](const Tile& tile) {
        const uint8_t* row = rows + unfolded(tile.row, count, fold) * row_bytes;
        put(use, *layout, tile, row + tile.element() * WORD_BYTES[type], int(type),
            packed + tile.row * layout->packed_bytes);
    });
}

// All segments are INT8 or raw.
void zpp_requantize(const Layout* layout, const uint8_t* rows, int64_t type, uint8_t* held,
                    uint8_t* packed, int64_t count, int64_t threads) {
    const QuantizeKernels& use = kernels();
    const int64_t row_bytes = layout->elements * WORD_BYTES[type];
    const int64_t bytes = count * (row_bytes + layout->packed_bytes);
    share(*layout, count, bytes, threads, [=, &use](const Tile& tile) {
        const uint8_t* values = rows + tile.row * row_bytes + tile.element() * WORD_BYTES[type];
        uint8_t* to = packed + tile.row * layout->packed_bytes;
        if (tile.segment->bits == RAW) return put(use, *layout, tile, values, int(type), to);
        if (tile.is_first_of_row(*layout)) clear_gaps(*layout, to);
        use.requantize[type](values, tile.scales(held + tile.row * layout->packed_bytes),
                             tile.codes(to), tile.scales(to), tile.size);
    });
}

void zpp_dequantize(const Layout* layout, uint8_t* packed, uint8_t* rows, int64_t type,
                    int64_t count, int64_t fold, int64_t threads) {
    const QuantizeKernels& use = kernels();
    const int64_t row_bytes = layout->elements * WORD_BYTES[type];
    const int64_t bytes = count * (row_bytes + layout->packed_bytes);
    share(*layout, count, bytes, threads, [=, &use](const Tile& tile) {
        uint8_t* from = packed + tile.row * layout->packed_bytes;
        uint8_t* to = rows + unfolded(tile.row, count, fold) * row_bytes +
                      tile.element() * WORD_BYTES[type];
        if (tile.segment->bits == RAW) {
            use.convert.from_to[layout->wire][type](tile.raw(from, layout->wire), to, tile.size);
        } else {
            const Coded coded{tile.codes(from), tile.scales(from)};
            use.of[tile.segment->width()].dequantize[type](coded, to, tile.size);
        }
    });
}

// The two layouts have segments of the same sizes.
void zpp_reduce_quantize(const Layout* layout, uint8_t* packed, const Layout* onto,
                         uint8_t* reduced, int64_t count, int64_t terms, int64_t threads) {
    const QuantizeKernels& use = kernels();
    const int64_t bytes = count * (terms * layout->packed_bytes + onto->packed_bytes);
    share(*layout, count, bytes, threads, [=, &use](const Tile& tile) {
        alignas(64) float sums[TILE];
        uint8_t* first = packed + tile.row * layout->packed_bytes;
        uint8_t* out = reduced + tile.row * onto->packed_bytes;
        const int64_t stride = count * layout->packed_bytes;
        Tile target = tile;
        target.segment = onto->segments() + (tile.segment - layout->segments());
        const bool rotated = is_rotated(tile.segment->bits);
        const bool stays = rotated == is_rotated(target.segment->bits);
        Extremes space;
        Extremes* extremes = stays && has_extremes(*tile.segment) && has_extremes(*target.segment)
                                 ? &space : nullptr;
        add_up(use, *layout, tile, first, stride, terms, sums, extremes);
        if (!stays && rotated) use.unrotate(sums, tile.size);
        if (!stays || target.segment->bits == RAW) {
            return put(use, *onto, target, sums, FP32, out);
        }
        if (target.is_first_of_row(*onto)) clear_gaps(*onto, out);
        use.of[target.segment->width()].quantize_sum(sums, extremes, target.codes(out),
                                                     target.scales(out), tile.size);
    });
}

void zpp_reduce_dequantize(const Layout* layout, uint8_t* packed, uint8_t* out, int64_t type,
                           int64_t terms, int64_t threads) {
    const QuantizeKernels& use = kernels();
    const int64_t bytes = terms * layout->packed_bytes + layout->elements * WORD_BYTES[type];
    share(*layout, 1, bytes, threads, [=, &use](const Tile& tile) {
        alignas(64) float sums[TILE];
        add_up(use, *layout, tile, packed, layout->packed_bytes, terms, sums, nullptr);
        if (is_rotated(tile.segment->bits)) use.unrotate(sums, tile.size);
        use.convert.from_to[FP32][type](sums, out + tile.element() * WORD_BYTES[type], tile.size);
    });
}

}  // extern "C"
