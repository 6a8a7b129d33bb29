// Quantization on the GPU: rows of values to packed rows and back.

#include "cuda_pairs.h"
#include "cuda_tile.h"

namespace zpp {
namespace {

template <Type T, int VEC>
ZPP_DEVICE void pack(const uint8_t* values, const Place& place, int wire, const Tile& tile,
                     uint8_t* packed) {
    Held<VEC> held;
    read_numbers<T, VEC>(values, tile, &held);
    put(held, false, place, wire, tile, packed);
}

template <Width W, int VEC>
ZPP_DEVICE void read_and_add(const uint8_t* codes, const uint8_t* scales, const Tile& tile,
                             Held<VEC>* held) {
    Coded<W, VEC> read;
    read_codes(codes, scales, tile, &read);
    add_codes(read, tile, held);
}

template <Type T, int VEC>
ZPP_DEVICE void unpack(const Place& place, int wire, const Tile& tile, uint8_t* packed,
                       uint8_t* values) {
    Held<VEC> held;
    if (place.bits == RAW) {
        read_wire(wire, raw_at(place, wire, tile, packed), tile, &held);
    } else {
        clear(&held);
        const uint8_t* codes = codes_at(place, tile, packed);
        const uint8_t* scales = scales_at(place, tile, packed);
        const Width width = width_of(place.bits);
        if (width == INT8) {
            read_and_add<INT8>(codes, scales, tile, &held);
        } else if (width == INT4) {
            read_and_add<INT4>(codes, scales, tile, &held);
        } else {
            if (width == ROTATED4) {
                read_and_add<INT4>(codes, scales, tile, &held);
            } else if (width == INT2) {
                read_and_add<INT2>(codes, scales, tile, &held);
            } else {
                read_and_add<INT3>(codes, scales, tile, &held);
            }
            unrotate(held.value, tile.lane);
        }
    }
    write_numbers<T, VEC>(held, tile, values);
}

// Whether wide accesses fit the values and, for raw segments, the packed row.
template <Type T, int VEC>
ZPP_DEVICE bool both_fit(const uint8_t* values, const Place& place, int wire, const Tile& tile,
                         uint8_t* packed) {
    if (!fits<T, VEC>(values, tile.size)) return false;
    return place.bits != RAW ||
           wire_fits<VEC>(wire, raw_at(place, wire, tile, packed), tile.size);
}

template <Type T>
__global__ void __launch_bounds__(WARPS * LANES) quantize_rows(const __grid_constant__ Job job) {
    constexpr int SIZE = int(sizeof(typename Element<T>::Word)), VEC = 16 / SIZE;
    const Table& table = job.table;
    Tile tile;
    if (!find_tile(table, &tile)) return;
    const Entry& entry = table.entries[tile.entry];
    const int64_t element = job.row() * table.elements + entry.start + tile.first;
    const uint8_t* values = job.from + element * SIZE;
    uint8_t* packed = job.to + job.packed_row() * table.packed_bytes;
    if (both_fit<T, VEC>(values, entry.packed, table.wire, tile, packed)) {
        pack<T, VEC>(values, entry.packed, table.wire, tile, packed);
    } else {
        pack<T, 2>(values, entry.packed, table.wire, tile, packed);
    }
}

// fp32 to INT8 by the scales of the rows that are held where they fit; all segments are INT8 or raw.
template <int VEC>
ZPP_DEVICE void repack(const uint8_t* values, const Place& place, int wire, const Tile& tile,
                       const uint8_t* scales_held, uint8_t* packed) {
    Held<VEC> held;
    read_numbers<FP32, VEC>(values, tile, &held);
    if (place.bits == RAW) return put_raw(held, place, wire, tile, packed);
    uint8_t* scales = scales_at(place, tile, packed);
    write_codes<INT8, VEC>(held, tile, INT8, codes_at(place, tile, packed), scales, scales_held);
    clear_gap(place, tile, scales + (tile.size + BLOCK8 - 1) / BLOCK8 * 2);
}

__global__ void __launch_bounds__(WARPS * LANES) requantize_rows(const __grid_constant__ Job job) {
    const Table& table = job.table;
    Tile tile;
    if (!find_tile(table, &tile)) return;
    const Entry& entry = table.entries[tile.entry];
    const int64_t element = job.row() * table.elements + entry.start + tile.first;
    const uint8_t* values = job.from + element * 4;
    uint8_t* packed = job.to + job.row() * table.packed_bytes;
    const uint8_t* scales = job.held + job.row() * table.packed_bytes + entry.packed.scales_at +
                            tile.first / BLOCK8 * 2;
    if (both_fit<FP32, 4>(values, entry.packed, table.wire, tile, packed)) {
        repack<4>(values, entry.packed, table.wire, tile, scales, packed);
    } else {
        repack<2>(values, entry.packed, table.wire, tile, scales, packed);
    }
}

template <Type T>
__global__ void __launch_bounds__(WARPS * LANES) dequantize_rows(const __grid_constant__ Job job) {
    constexpr int SIZE = int(sizeof(typename Element<T>::Word)), VEC = 16 / SIZE;
    const Table& table = job.table;
    Tile tile;
    if (!find_tile(table, &tile)) return;
    const Entry& entry = table.entries[tile.entry];
    const int64_t element = job.row() * table.elements + entry.start + tile.first;
    uint8_t* values = job.to + element * SIZE;
    uint8_t* packed = job.from + job.packed_row() * table.packed_bytes;
    if (both_fit<T, VEC>(values, entry.packed, table.wire, tile, packed)) {
        unpack<T, VEC>(entry.packed, table.wire, tile, packed, values);
    } else {
        unpack<T, 2>(entry.packed, table.wire, tile, packed, values);
    }
}

// Numbers of 16 bits as they are in memory to codes of W, the only ones of the table. With `job.held`,
// INT8 by the scales of those rows where they fit.
template <Type T, Width W>
__global__ void __launch_bounds__(WARPS * LANES) quantize_pairs(const __grid_constant__ Job job) {
    const Table& table = job.table;
    Tile tile;
    if (!find_tile(table, &tile)) return;
    const Entry& entry = table.entries[tile.entry];
    const uint8_t* values = job.from + (job.row() * table.elements + entry.start + tile.first) * 2;
    uint8_t* packed = job.to + job.packed_row() * table.packed_bytes;
    if (entry.packed.bits == RAW) {
        uint8_t* to = raw_at(entry.packed, table.wire, tile, packed);
        for (int i = tile.lane; i < tile.size; i += LANES) {
            write_one(table.wire, to_float<T>(read_one<T>(values + i * 2)), to, i);
        }
        return clear_gap(entry.packed, tile, to + tile.size * word_bytes(table.wire));
    }
    Pairs pairs;
    read_pairs(values, tile, &pairs);
    uint8_t* codes = packed + entry.packed.data_at + tile.first * Codes<W>::BITS / 8;
    const int64_t at = entry.packed.scales_at + tile.first / Codes<W>::BLOCK * 2;
    const uint8_t* held = job.held ? job.held + job.packed_row() * table.packed_bytes + at : nullptr;
    write_pairs<T, W>(pairs, tile, codes, packed + at, held);
    clear_gap(entry.packed, tile, packed + at + (tile.size + Codes<W>::BLOCK - 1) / Codes<W>::BLOCK * 2);
}

constexpr Kernel* QUANTIZE[NUM_TYPES] = {quantize_rows<BF16>, quantize_rows<FP16>,
                                         quantize_rows<FP32>};
constexpr Kernel* PAIRS[][2] = {{quantize_pairs<BF16, INT8>, quantize_pairs<BF16, INT4>},
                                {quantize_pairs<FP16, INT8>, quantize_pairs<FP16, INT4>}};
constexpr Kernel* REQUANTIZE[NUM_TYPES] = {PAIRS[BF16][INT8], PAIRS[FP16][INT8], requantize_rows};
constexpr Kernel* DEQUANTIZE[NUM_TYPES] = {dequantize_rows<BF16>, dequantize_rows<FP16>,
                                           dequantize_rows<FP32>};

Job job_of(uint8_t* from, uint8_t* to, int64_t count, int64_t fold) {
    Job job = {};
    job.from = from;
    job.to = to;
    job.slices = count / fold;
    job.parts = fold;
    job.terms = 1;
    return job;
}

}  // namespace

cudaError_t load_quantize() {
    cudaError_t error = load(QUANTIZE, NUM_TYPES);
    for (int type = 0; type < FP32 && !error; ++type) error = load(PAIRS[type], 2);
    if (!error) error = load(REQUANTIZE, NUM_TYPES);
    return error ? error : load(DEQUANTIZE, NUM_TYPES);
}

}  // namespace zpp

using namespace zpp;

extern "C" {

int64_t zpp_quantize(const Layout* layout, uint8_t* rows, int64_t type, uint8_t* packed,
                     int64_t count, int64_t fold, int64_t device, void* stream) {
    Job job = job_of(rows, packed, count, fold);
    const Width width = only_width(*layout);
    const bool in_pairs = type != FP32 && (width == INT8 || width == INT4);
    return launch(in_pairs ? PAIRS[type][width] : QUANTIZE[type], &job, *layout, *layout, device, stream);
}

int64_t zpp_requantize(const Layout* layout, uint8_t* rows, int64_t type, uint8_t* held,
                       uint8_t* packed, int64_t count, int64_t device, void* stream) {
    Job job = job_of(rows, packed, count, 1);
    job.held = held;
    return launch(REQUANTIZE[type], &job, *layout, *layout, device, stream);
}

int64_t zpp_dequantize(const Layout* layout, uint8_t* packed, uint8_t* rows, int64_t type,
                       int64_t count, int64_t fold, int64_t device, void* stream) {
    Job job = job_of(packed, rows, count, fold);
    return launch(DEQUANTIZE[type], &job, *layout, *layout, device, stream);
}

}  // extern "C"
