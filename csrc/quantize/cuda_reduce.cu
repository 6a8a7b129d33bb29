// From packed rows on the GPU: to values, or summed in fp32, in order, and packed again or written out.

#include "cuda_group.h"
#include "cuda_octets.h"

namespace zpp {
namespace {

// Codes of FROM become those of TO, beside which raw values stay so; or what the table says.
template <Width FROM, Width TO>
__global__ void __launch_bounds__(WARPS * LANES, FROM == ANY ? 2 : 3)
    reduce_groups(const __grid_constant__ Job job) {
    const Table& table = job.table;
    Tile tile;
    if (!find_tile(table, &tile)) return;
    const Entry& entry = table.entries[tile.entry];
    const uint8_t* packed = job.from + job.slice() * table.packed_bytes;
    uint8_t* reduced = job.to + job.slice() * table.reduced_bytes;
    const int wire = table.reduced_wire;
    if (FROM != ANY && entry.packed.bits == RAW) {
        uint8_t* to = raw_at(entry.reduced, wire, tile, reduced);
        sum_few(job, tile, entry.packed, packed, wire, to);
        return clear_gap(entry.reduced, tile, to + tile.size * word_bytes(wire));
    }
    Group sums;
    if (FROM == ANY && entry.packed.bits == RAW) {
        sum_raw(job, tile, entry.packed, packed, sums);
    } else {
        sum_codes<FROM>(job, tile, entry.packed, packed, sums);
    }
    clear_beyond(tile, sums);
    const bool rotated = FROM == ANY ? is_rotated(entry.packed.bits) : is_rotated(FROM);
    put<TO>(sums, rotated, entry.reduced, wire, tile, reduced);
}

// Codes of INT8 or INT4, the only ones of the table, to numbers.
template <Type T, Width W>
__global__ void __launch_bounds__(WARPS * LANES) dequantize_octets(const __grid_constant__ Job job) {
    Tile tile;
    if (!find_tile(job.table, &tile)) return;
    const Place& place = job.table.entries[tile.entry].packed;
    const Ends<T> ends(job, tile, job.to, job.from);
    if (place.bits == RAW) return sum_few(job, tile, place, ends.packed, T, ends.values);
    Octet<T> octet;
    read_codes<T, W>(place, tile, ends.packed, &octet);
    write_octet(octet, tile, ends.values);
}

// The sums of codes of W, or of what the table says, to numbers; one term to dequantize.
template <Type T, Width W>
__global__ void __launch_bounds__(WARPS * LANES, W == ANY ? 2 : 3)
    sum_groups(const __grid_constant__ Job job) {
    Tile tile;
    if (!find_tile(job.table, &tile)) return;
    const Place& place = job.table.entries[tile.entry].packed;
    const Ends<T> ends(job, tile, job.to, job.from);
    if (W != ANY && place.bits == RAW) return sum_few(job, tile, place, ends.packed, T, ends.values);
    Group sums;
    if (W == ANY && place.bits == RAW) {
        sum_raw(job, tile, place, ends.packed, sums);
    } else {
        sum_codes<W>(job, tile, place, ends.packed, sums);
    }
    if (W == ANY ? is_rotated(place.bits) : is_rotated(W)) unrotate(sums);
    write_numbers<T>(sums, tile, ends.values);
}

// Of the pairs of widths that a step has.
struct Pair {
    Width from, to;
    Kernel* kernel;
};
template <Width FROM, Width TO> constexpr Pair pair_of = {FROM, TO, reduce_groups<FROM, TO>};
constexpr Pair PAIRS[] = {
    pair_of<INT8, INT8>,         pair_of<INT8, INT4>,     pair_of<INT8, ROTATED4>,
    pair_of<INT8, INT3>,         pair_of<INT3, INT3>,     pair_of<ROTATED4, INT3>,
    pair_of<ROTATED4, ROTATED4>, pair_of<ANY, ANY>,
};
// By type and width. In 16 bits, widths that no step has are ANY's.
constexpr Kernel* SUM[NUM_TYPES][NUM_WIDTHS + 1] = {
    {sum_groups<BF16, INT8>, sum_groups<BF16, INT4>, sum_groups<BF16, INT3>,
     sum_groups<BF16, ROTATED4>, sum_groups<BF16, ANY>, sum_groups<BF16, ANY>},
    {sum_groups<FP16, ANY>, sum_groups<FP16, ANY>, sum_groups<FP16, ANY>, sum_groups<FP16, ANY>,
     sum_groups<FP16, ANY>, sum_groups<FP16, ANY>},
    {sum_groups<FP32, INT8>, sum_groups<FP32, INT4>, sum_groups<FP32, INT3>,
     sum_groups<FP32, ROTATED4>, sum_groups<FP32, INT2>, sum_groups<FP32, ANY>},
};
constexpr Kernel* DEQUANTIZE[NUM_TYPES][2] = {
    {dequantize_octets<BF16, INT8>, dequantize_octets<BF16, INT4>},
    {dequantize_octets<FP16, INT8>, dequantize_octets<FP16, INT4>},
    {dequantize_octets<FP32, INT8>, dequantize_octets<FP32, INT4>},
};

// What is raw in one layout and not in the other is ANY's.
Kernel* reduce_kernel(const Layout& packed, const Layout& reduced) {
    Width from = only_width(packed), to = only_width(reduced);
    for (int64_t i = 0; i < packed.count; ++i) {
        const bool raw = packed.segments()[i].bits == RAW;
        if (raw != (reduced.segments()[i].bits == RAW)) from = ANY;
    }
    for (const Pair& pair : PAIRS) {
        if (pair.from == from && pair.to == to) return pair.kernel;
    }
    return reduce_groups<ANY, ANY>;
}

}  // namespace

cudaError_t load_reduce() {
    cudaError_t error = load(&SUM[0][0], NUM_TYPES * (NUM_WIDTHS + 1));
    if (!error) error = load(&DEQUANTIZE[0][0], NUM_TYPES * 2);
    for (const Pair& pair : PAIRS) {
        if (!error) error = load(&pair.kernel, 1);
    }
    return error;
}

}  // namespace zpp

using namespace zpp;

extern "C" {

int64_t zpp_dequantize(const Layout* layout, uint8_t* packed, uint8_t* rows, int64_t type,
                       int64_t count, int64_t fold, int64_t device, void* stream) {
    Job job = job_of(packed, rows, count, fold);
    const Width width = only_width(*layout);
    Kernel* kernel = width <= INT4 ? DEQUANTIZE[type][width] : SUM[type][width];
    return launch(kernel, &job, *layout, *layout, device, stream);
}

// The two layouts have segments of the same sizes.
int64_t zpp_reduce_quantize(const Layout* layout, uint8_t* packed, const Layout* onto,
                            uint8_t* reduced, int64_t count, int64_t terms, int64_t device,
                            void* stream) {
    Job job = job_of(packed, reduced, count, 1);
    job.terms = terms;
    job.stride = count * layout->packed_bytes;
    Kernel* kernel = reduce_kernel(*layout, *onto);
    return launch(kernel, &job, *layout, *onto, device, stream);
}

int64_t zpp_reduce_dequantize(const Layout* layout, uint8_t* packed, uint8_t* out, int64_t type,
                              int64_t terms, int64_t device, void* stream) {
    Job job = job_of(packed, out, 1, 1);
    job.terms = terms;
    job.stride = layout->packed_bytes;
    return launch(SUM[type][only_width(*layout)], &job, *layout, *layout, device, stream);
}

}  // extern "C"
