// Quantization on the GPU: rows of values to packed rows and back.

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

// INT8 by the scales of the rows that are held, `packed`, where they fit; all segments are INT8 or raw.
template <Type T, int VEC>
ZPP_DEVICE void repack(const uint8_t* values, const Place& place, int wire, const Tile& tile,
                       const uint8_t* scales_held, uint8_t* packed) {
    Held<VEC> held;
    read_numbers<T, VEC>(values, tile, &held);
    if (place.bits == RAW) return put_raw(held, place, wire, tile, packed);
    uint8_t* scales = scales_at(place, tile, packed);
    write_codes<INT8, VEC>(held, tile, INT8, codes_at(place, tile, packed), scales, scales_held);
    clear_gap(place, tile, scales + (tile.size + BLOCK8 - 1) / BLOCK8 * 2);
}

template <Type T>
__global__ void __launch_bounds__(WARPS * LANES) requantize_rows(const __grid_constant__ Job job) {
    constexpr int SIZE = int(sizeof(typename Element<T>::Word)), VEC = 16 / SIZE;
    const Table& table = job.table;
    Tile tile;
    if (!find_tile(table, &tile)) return;
    const Entry& entry = table.entries[tile.entry];
    const int64_t element = job.row() * table.elements + entry.start + tile.first;
    const uint8_t* values = job.from + element * SIZE;
    uint8_t* packed = job.to + job.row() * table.packed_bytes;
    const uint8_t* scales = job.held + job.row() * table.packed_bytes + entry.packed.scales_at +
                            tile.first / BLOCK8 * 2;
    if (both_fit<T, VEC>(values, entry.packed, table.wire, tile, packed)) {
        repack<T, VEC>(values, entry.packed, table.wire, tile, scales, packed);
    } else {
        repack<T, 2>(values, entry.packed, table.wire, tile, scales, packed);
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

constexpr Kernel* QUANTIZE[NUM_TYPES] = {quantize_rows<BF16>, quantize_rows<FP16>,
                                         quantize_rows<FP32>};
constexpr Kernel* REQUANTIZE[NUM_TYPES] = {requantize_rows<BF16>, requantize_rows<FP16>,
                                           requantize_rows<FP32>};
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
    if (!error) error = load(REQUANTIZE, NUM_TYPES);
    return error ? error : load(DEQUANTIZE, NUM_TYPES);
}

}  // namespace zpp

using namespace zpp;

extern "C" {

int64_t zpp_quantize(const Layout* layout, uint8_t* rows, int64_t type, uint8_t* packed,
                     int64_t count, int64_t fold, int64_t device, void* stream) {
    Job job = job_of(rows, packed, count, fold);
    return launch(QUANTIZE[type], &job, *layout, *layout, device, stream);
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
