// Reduction on the GPU: packed rows are summed in fp32, in order, and packed again or written out.

#include "cuda_group.h"
#include "cuda_tile.h"

namespace zpp {
namespace {

// Terms whose codes a lane requests at once: 4 of 32 bytes each, as many bytes in flight as in the
// quantization of fp32. Small units take more requests for as many bytes, so they get half of it.
template <Width W, int VEC> constexpr int64_t AT_ONCE = VEC < 8 || W == INT3 ? 2 : 4;

template <Width W, int VEC>
ZPP_DEVICE void sum_codes(const Job& job, const Tile& tile, const uint8_t* codes,
                          const uint8_t* scales, Held<VEC>* sums) {
    for (int64_t first = 0; first < job.terms; first += AT_ONCE<W, VEC>) {
        Coded<W, VEC> read[AT_ONCE<W, VEC>];
#pragma unroll
        for (int64_t i = 0; i < AT_ONCE<W, VEC>; ++i) {
            const int64_t skip = (first + i) * job.stride;
            if (first + i < job.terms) read_codes(codes + skip, scales + skip, tile, &read[i]);
        }
#pragma unroll
        for (int64_t i = 0; i < AT_ONCE<W, VEC>; ++i) {
            if (first + i < job.terms) add_codes(read[i], tile, sums);
        }
    }
}

template <int VEC>
ZPP_DEVICE void sum_raw(const Job& job, const Tile& tile, const uint8_t* from, Held<VEC>* sums) {
    for (int64_t term = 0; term < job.terms; ++term) {
        Held<VEC> term_values;
        read_wire(job.table.wire, from + term * job.stride, tile, &term_values);
#pragma unroll
        for (int u = 0; u < Held<VEC>::UNITS; ++u) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) sums->value[u][i] += term_values.value[u][i];
        }
    }
}

// The sums of what codes stand for, rotated or not.
template <int VEC>
ZPP_DEVICE void sum_terms(const Job& job, const Tile& tile, const Place& place, uint8_t* packed,
                          Held<VEC>* sums) {
    clear(sums);
    if (place.bits == RAW) {
        return sum_raw(job, tile, raw_at(place, job.table.wire, tile, packed), sums);
    }
    const uint8_t* codes = codes_at(place, tile, packed);
    const uint8_t* scales = scales_at(place, tile, packed);
    const Width width = width_of(place.bits);
    if (width == INT8) {
        sum_codes<INT8>(job, tile, codes, scales, sums);
    } else if (width == INT2) {
        sum_codes<INT2>(job, tile, codes, scales, sums);
    } else if (width != INT3) {
        sum_codes<INT4>(job, tile, codes, scales, sums);
    } else if constexpr (VEC <= 8) {
        sum_codes<INT3>(job, tile, codes, scales, sums);
    }
}

template <int VEC>
ZPP_DEVICE void reduce(const Job& job, const Tile& tile, uint8_t* packed, uint8_t* reduced) {
    const Entry& entry = job.table.entries[tile.entry];
    Held<VEC> sums;
    sum_terms(job, tile, entry.packed, packed, &sums);
    clear_beyond(tile, &sums);
    const bool rotated = is_rotated(entry.packed.bits);
    if (rotated && !is_rotated(entry.reduced.bits)) unrotate(sums.value, tile.lane);
    put(sums, rotated, entry.reduced, job.table.reduced_wire, tile, reduced);
}

__global__ void __launch_bounds__(WARPS * LANES) reduce_rows(const __grid_constant__ Job job) {
    const Table& table = job.table;
    Tile tile;
    if (!find_tile(table, &tile)) return;
    const Entry& entry = table.entries[tile.entry];
    const bool raw = entry.packed.bits == RAW, raw_after = entry.reduced.bits == RAW;
    uint8_t* packed = job.from + job.row() * table.packed_bytes;
    uint8_t* reduced = job.to + job.row() * table.reduced_bytes;
    const uint8_t* from = raw_at(entry.packed, table.wire, tile, packed);
    const uint8_t* to = raw_at(entry.reduced, table.reduced_wire, tile, reduced);
    if ((!raw || wire_fits<8>(table.wire, from, tile.size)) &&
        (!raw_after || wire_fits<8>(table.reduced_wire, to, tile.size))) {
        return reduce<8>(job, tile, packed, reduced);
    }
    reduce<2>(job, tile, packed, reduced);
}

template <Type T, int VEC>
ZPP_DEVICE void sum_up(const Job& job, const Tile& tile, uint8_t* out) {
    Held<VEC> sums;
    const Place& place = job.table.entries[tile.entry].packed;
    sum_terms(job, tile, place, job.from, &sums);
    if (is_rotated(place.bits)) unrotate(sums.value, tile.lane);
    write_numbers<T, VEC>(sums, tile, out);
}

template <Type T>
__global__ void __launch_bounds__(WARPS * LANES) sum_rows(const __grid_constant__ Job job) {
    constexpr int SIZE = int(sizeof(typename Element<T>::Word)), VEC = 16 / SIZE;
    const Table& table = job.table;
    Tile tile;
    if (!find_tile(table, &tile)) return;
    const Entry& entry = table.entries[tile.entry];
    uint8_t* out = job.to + (entry.start + tile.first) * SIZE;
    const uint8_t* raw = raw_at(entry.packed, table.wire, tile, job.from);
    if (fits<T, VEC>(out, tile.size) &&
        (entry.packed.bits != RAW || wire_fits<VEC>(table.wire, raw, tile.size))) {
        sum_up<T, VEC>(job, tile, out);
    } else {
        sum_up<T, 2>(job, tile, out);
    }
}

// Add terms, as many at once as a lane then waits for, while there are so many left.
template <Width W, int AT_ONCE>
ZPP_DEVICE void add_terms(int64_t stride, const Tile& tile, const uint8_t*& codes,
                          const uint8_t*& scales, int* left, float (&sums)[PER_LANE]) {
    for (; *left >= AT_ONCE; *left -= AT_ONCE) {
        GroupOfCodes<W> read[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            read_group(codes, scales, tile, &read[i]);
            codes += stride;
            scales += stride;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) add_group(read[i], sums);
    }
}

template <Width W>
ZPP_DEVICE void sum_groups(const Job& job, const Tile& tile, const Place& place,
                           const uint8_t* packed, float (&sums)[PER_LANE]) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) sums[i] = 0.0f;
    const uint8_t* codes = packed + place.data_at + tile.first * Codes<W>::BITS / 8;
    const uint8_t* scales = packed + place.scales_at + tile.first / Codes<W>::BLOCK * 2;
    int left = int(job.terms);
    if (W != INT8) add_terms<W, 4>(job.stride, tile, codes, scales, &left, sums);
    add_terms<W, 2>(job.stride, tile, codes, scales, &left, sums);
    add_terms<W, 1>(job.stride, tile, codes, scales, &left, sums);
}

// The sum of number `i` of raw segments, which are few beside those of codes.
ZPP_DEVICE float sum_of_raw(const Job& job, const Place& place, const Tile& tile, uint8_t* packed, int i) {
    const int wire = job.table.wire;
    const uint8_t* from = raw_at(place, wire, tile, packed) + i * word_bytes(wire);
    float sum = 0.0f;
    for (int64_t term = 0; term < job.terms; ++term, from += job.stride) {
        sum += wire == FP32   ? to_float<FP32>(read_one<FP32>(from))
               : wire == FP16 ? to_float<FP16>(read_one<FP16>(from))
                              : to_float<BF16>(read_one<BF16>(from));
    }
    return sum;
}

// All codes of the table are of FROM, and become those of TO. What is raw stays so.
template <Width FROM, Width TO>
__global__ void __launch_bounds__(WARPS * LANES, 3) reduce_groups(const __grid_constant__ Job job) {
    const Table& table = job.table;
    Tile tile;
    if (!find_tile(table, &tile)) return;
    const Entry& entry = table.entries[tile.entry];
    uint8_t* packed = job.from + job.row() * table.packed_bytes;
    uint8_t* reduced = job.to + job.row() * table.reduced_bytes;
    if (entry.packed.bits == RAW) {
        uint8_t* to = raw_at(entry.reduced, table.reduced_wire, tile, reduced);
        for (int i = tile.lane; i < tile.size; i += LANES) {
            write_one(table.reduced_wire, sum_of_raw(job, entry.packed, tile, packed, i), to, i);
        }
        return clear_gap(entry.reduced, tile, to + tile.size * word_bytes(table.reduced_wire));
    }
    float sums[PER_LANE];
    sum_groups<FROM>(job, tile, entry.packed, packed, sums);
    clear_beyond(tile, sums);
    if (is_rotated(TO) && !is_rotated(FROM)) rotate_unit(sums, 0);
    if (is_rotated(FROM) && !is_rotated(TO)) unrotate(sums);
    constexpr int BLOCK = Codes<TO>::BLOCK;
    uint8_t* codes = reduced + entry.reduced.data_at + tile.first * Codes<TO>::BITS / 8;
    uint8_t* scales = reduced + entry.reduced.scales_at + tile.first / BLOCK * 2;
    write_group<TO>(sums, tile, codes, scales);
    clear_gap(entry.reduced, tile, scales + (tile.size + BLOCK - 1) / BLOCK * 2);
}

template <Type T, Width FROM>
__global__ void __launch_bounds__(WARPS * LANES, 3) sum_groups_up(const __grid_constant__ Job job) {
    const Table& table = job.table;
    Tile tile;
    if (!find_tile(table, &tile)) return;
    const Entry& entry = table.entries[tile.entry];
    uint8_t* out = job.to + (entry.start + tile.first) * int(sizeof(typename Element<T>::Word));
    if (entry.packed.bits == RAW) {
        for (int i = tile.lane; i < tile.size; i += LANES) {
            write_one(T, sum_of_raw(job, entry.packed, tile, job.from, i), out, i);
        }
        return;
    }
    float sums[PER_LANE];
    sum_groups<FROM>(job, tile, entry.packed, job.from, sums);
    if (is_rotated(FROM)) unrotate(sums);
    write_numbers<T>(sums, tile, out);
}

constexpr Kernel* SUM[NUM_TYPES] = {sum_rows<BF16>, sum_rows<FP16>, sum_rows<FP32>};
constexpr Kernel* REDUCE = reduce_rows;
// Of the pairs of widths and of the types that a step of training has.
struct Pair {
    Width from, to;
    Kernel* kernel;
};
template <Width FROM, Width TO> constexpr Pair pair_of = {FROM, TO, reduce_groups<FROM, TO>};
constexpr Pair PAIRS[] = {
    pair_of<INT8, INT8>, pair_of<INT8, INT4>, pair_of<INT8, ROTATED4>, pair_of<INT8, INT3>,
    pair_of<ROTATED4, ROTATED4>, pair_of<ROTATED4, INT3>, pair_of<INT3, INT3>,
};
constexpr Kernel* SUM_GROUPS[2][INT2] = {
    {sum_groups_up<BF16, INT8>, sum_groups_up<BF16, INT4>, sum_groups_up<BF16, INT3>,
     sum_groups_up<BF16, ROTATED4>},
    {sum_groups_up<FP32, INT8>, sum_groups_up<FP32, INT4>, sum_groups_up<FP32, INT3>,
     sum_groups_up<FP32, ROTATED4>},
};

Kernel* reduce_kernel(const Layout& packed, const Layout& reduced) {
    const Width from = only_width(packed), to = only_width(reduced);
    bool same_are_raw = true;
    for (int64_t i = 0; i < packed.count; ++i) {
        same_are_raw &= (packed.segments()[i].bits == RAW) == (reduced.segments()[i].bits == RAW);
    }
    for (const Pair& pair : PAIRS) {
        if (same_are_raw && pair.from == from && pair.to == to) return pair.kernel;
    }
    return REDUCE;
}

Kernel* sum_kernel(const Layout& packed, int64_t type) {
    const Width width = only_width(packed);
    return type == FP16 || width >= INT2 ? SUM[type] : SUM_GROUPS[type == FP32][width];
}

}  // namespace

cudaError_t load_reduce() {
    cudaError_t error = load(SUM, NUM_TYPES);
    if (!error) error = load(&REDUCE, 1);
    for (const Pair& pair : PAIRS) {
        if (!error) error = load(&pair.kernel, 1);
    }
    if (!error) error = load(SUM_GROUPS[0], INT2);
    return error ? error : load(SUM_GROUPS[1], INT2);
}

}  // namespace zpp

using namespace zpp;

extern "C" {

// The two layouts have segments of the same sizes.
int64_t zpp_reduce_quantize(const Layout* layout, uint8_t* packed, const Layout* onto,
                            uint8_t* reduced, int64_t count, int64_t terms, int64_t device,
                            void* stream) {
    Job job = {};
    job.from = packed;
    job.to = reduced;
    job.slices = count;
    job.parts = 1;
    job.terms = terms;
    job.stride = count * layout->packed_bytes;
    return launch(reduce_kernel(*layout, *onto), &job, *layout, *onto, device, stream);
}

int64_t zpp_reduce_dequantize(const Layout* layout, uint8_t* packed, uint8_t* out, int64_t type,
                              int64_t terms, int64_t device, void* stream) {
    Job job = {};
    job.from = packed;
    job.to = out;
    job.slices = 1;
    job.parts = 1;
    job.terms = terms;
    job.stride = layout->packed_bytes;
    return launch(sum_kernel(*layout, type), &job, *layout, *layout, device, stream);
}

}  // extern "C"
