// Reduction on the GPU: packed rows are summed in fp32, in order, and packed again or written out.

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
    const bool three_bits = entry.packed.bits == 3 || entry.reduced.bits == 3;
    if (!raw && !raw_after && !three_bits) return reduce<16>(job, tile, packed, reduced);
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

constexpr Kernel* SUM[NUM_TYPES] = {sum_rows<BF16>, sum_rows<FP16>, sum_rows<FP32>};
constexpr Kernel* REDUCE = reduce_rows;

}  // namespace

cudaError_t load_reduce() {
    const cudaError_t error = load(SUM, NUM_TYPES);
    return error ? error : load(&REDUCE, 1);
}

}  // namespace zpp

using namespace zpp;

extern "C" {

// The two layouts have segments of the same sizes.
int64_t zpp_reduce_quantize(const Layout* layout, uint8_t* packed, const Layout* onto,
                            uint8_t* reduced, int64_t count, int64_t terms, int64_t device,
                            void* stream) {
    Job job;
    job.from = packed;
    job.to = reduced;
    job.slices = count;
    job.parts = 1;
    job.terms = terms;
    job.stride = count * layout->packed_bytes;
    return launch(REDUCE, &job, *layout, *onto, device, stream);
}

int64_t zpp_reduce_dequantize(const Layout* layout, uint8_t* packed, uint8_t* out, int64_t type,
                              int64_t terms, int64_t device, void* stream) {
    Job job;
    job.from = packed;
    job.to = out;
    job.slices = 1;
    job.parts = 1;
    job.terms = terms;
    job.stride = layout->packed_bytes;
    return launch(SUM[type], &job, *layout, *layout, device, stream);
}

}  // extern "C"
