// Quantization on the GPU: rows of values to packed rows.

#include "cuda_group.h"
#include "cuda_octets.h"

namespace zpp {
namespace {

// Values that stay raw, one by one: vectors beside matrices, which have codes.
template <Type T>
ZPP_DEVICE void copy_few(const uint8_t* values, int wire, const Place& place, const Tile& tile,
                         uint8_t* packed) {
    uint8_t* to = raw_at(place, wire, tile, packed);
    for (int i = tile.lane; i < tile.size; i += LANES) write_one(wire, read_one(T, values, i), to, i);
    clear_gap(place, tile, to + tile.size * word_bytes(wire));
}

// Numbers to codes of INT8 or INT4, the only ones of the table, by the scales of `job.held` if given.
template <Type T, Width W>
__global__ void __launch_bounds__(WARPS * LANES) quantize_octets(const __grid_constant__ Job job) {
    Tile tile;
    if (!find_tile(job.table, &tile)) return;
    const Place& place = job.table.entries[tile.entry].packed;
    const Ends<T> ends(job, tile, job.from, job.to);
    if (place.bits == RAW) return copy_few<T>(ends.values, job.table.wire, place, tile, ends.packed);
    Octet<T> octet;
    read_octet(ends.values, tile, &octet);
    const int64_t row = job.packed_row() * job.table.packed_bytes;
    write_codes<T, W>(octet, place, tile, ends.packed, job.held ? job.held + row : nullptr);
}

// Numbers to codes of W, or what the table says.
template <Type T, Width W>
__global__ void __launch_bounds__(WARPS * LANES, 3)
    quantize_groups(const __grid_constant__ Job job) {
    Tile tile;
    if (!find_tile(job.table, &tile)) return;
    const Place& place = job.table.entries[tile.entry].packed;
    const Ends<T> ends(job, tile, job.from, job.to);
    if (W != ANY && place.bits == RAW) {
        return copy_few<T>(ends.values, job.table.wire, place, tile, ends.packed);
    }
    Group value;
    read_numbers<T>(ends.values, tile, value);
    put<W>(value, false, place, job.table.wire, tile, ends.packed);
}

// By type and width. In 16 bits, widths that no step has are ANY's.
constexpr Kernel* QUANTIZE[NUM_TYPES][NUM_WIDTHS + 1] = {
    {quantize_octets<BF16, INT8>, quantize_octets<BF16, INT4>, quantize_groups<BF16, INT3>,
     quantize_groups<BF16, ROTATED4>, quantize_groups<BF16, ANY>, quantize_groups<BF16, ANY>},
    {quantize_octets<FP16, INT8>, quantize_octets<FP16, INT4>, quantize_groups<FP16, ANY>,
     quantize_groups<FP16, ANY>, quantize_groups<FP16, ANY>, quantize_groups<FP16, ANY>},
    {quantize_octets<FP32, INT8>, quantize_octets<FP32, INT4>, quantize_groups<FP32, INT3>,
     quantize_groups<FP32, ROTATED4>, quantize_groups<FP32, INT2>, quantize_groups<FP32, ANY>},
};

}  // namespace

cudaError_t load_quantize() {
    return load(&QUANTIZE[0][0], NUM_TYPES * (NUM_WIDTHS + 1));
}

}  // namespace zpp

using namespace zpp;

extern "C" {

int64_t zpp_quantize(const Layout* layout, uint8_t* rows, int64_t type, uint8_t* packed,
                     int64_t count, int64_t fold, int64_t device, void* stream) {
    Job job = job_of(rows, packed, count, fold);
    Kernel* kernel = QUANTIZE[type][only_width(*layout)];
    return launch(kernel, &job, *layout, *layout, device, stream);
}

int64_t zpp_requantize(const Layout* layout, uint8_t* rows, int64_t type, uint8_t* held,
                       uint8_t* packed, int64_t count, int64_t device, void* stream) {
    Job job = job_of(rows, packed, count, 1);
    job.held = held;
    return launch(QUANTIZE[type][INT8], &job, *layout, *layout, device, stream);
}

}  // extern "C"
