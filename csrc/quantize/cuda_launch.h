// A layout as kernels get it, and their launch.
#pragma once

#include "../shared/cuda_tiles.h"
#include "packed_row.h"

namespace zpp {

constexpr int MAX_SEGMENTS = 56;     // of one launch
constexpr int64_t FEW_BLOCKS = 512;  // about four for each multiprocessor
#ifndef ZPP_MAX_GRID
#define ZPP_MAX_GRID 65535  // thread blocks in y and z; the emulation in tests/ has fewer
#endif
constexpr int64_t MAX_GRID = ZPP_MAX_GRID;

// A segment's place in a packed row. After its scales, or its raw values, there are `gap` unused
// bytes; after its codes those up to the next aligned offset.
struct Place {
    int64_t scales_at, data_at;
    int32_t bits, gap;
};

struct Entry {
    int64_t start, size;
    Place packed, reduced;  // `reduced`: for reduce_quantize
};

struct Table {
    int64_t elements, packed_bytes, reduced_bytes;
    int32_t wire, reduced_wire;
    uint32_t count, tiles;
    uint32_t first_tile[MAX_SEGMENTS];
    Entry entries[MAX_SEGMENTS];
};

// Packed row k = part * slices + slice belongs to row slice * parts + part of the values. A grid has
// the tiles of a row in x, slices in y and parts in z, the latter two from a first one on.
struct Job {
    Table table;
    uint8_t *from, *to;
    int64_t slices, parts, first_slice, first_part;
    int64_t terms, stride;  // of a sum; `stride`: bytes from one term to the next
    const uint8_t* held;    // the packed rows whose scales stay, for requantize

    __device__ __forceinline__ int64_t slice() const { return first_slice + blockIdx.y; }
    __device__ __forceinline__ int64_t part() const { return first_part + blockIdx.z; }
    __device__ __forceinline__ int64_t packed_row() const { return part() * slices + slice(); }
    __device__ __forceinline__ int64_t row() const { return slice() * parts + part(); }
};
static_assert(sizeof(Job) <= MAX_PARAMETERS, "parameters of a kernel");

ZPP_DEVICE int word_bytes(int wire) { return wire == FP32 ? 4 : 2; }

template <class Byte> ZPP_DEVICE Byte* raw_at(const Place& place, int wire, const Tile& tile, Byte* packed) {
    return packed + place.data_at + tile.first * word_bytes(wire);
}

// The places of a tile: values of type T, and its packed row.
template <Type T> struct Ends {
    uint8_t *values, *packed;

    __device__ __forceinline__ Ends(const Job& job, const Tile& tile, uint8_t* rows,
                                    uint8_t* packed_rows) {
        const int64_t start = job.table.entries[tile.entry].start;
        const int64_t element = job.row() * job.table.elements + start + tile.first;
        values = rows + element * int(sizeof(typename Element<T>::Word));
        packed = packed_rows + job.packed_row() * job.table.packed_bytes;
    }
};

static inline Place place_of(const Layout& layout, int64_t index) {
    const Segment& segment = layout.segments()[index];
    const bool raw = segment.bits == RAW;
    bool last = true;  // of the raw segments, or of those with scales
    for (int64_t i = index + 1; i < layout.count && last; ++i) {
        last = (layout.segments()[i].bits == RAW) != raw;
    }
    const int64_t gap = gap_after(raw ? segment.raw_end(layout.wire) : segment.scales_end());
    return Place{segment.scales_at, segment.data_at, int32_t(segment.bits),
                 last ? int32_t(gap) : 0};
}

// Fill the table with the segments from `first` on, as many as fit. `reduced` may be the same layout.
static inline void fill(const Layout& packed, const Layout& reduced, int64_t first,
                        Table* table) {
    const int64_t left = packed.count - first;
    table->elements = packed.elements;
    table->packed_bytes = packed.packed_bytes;
    table->reduced_bytes = reduced.packed_bytes;
    table->wire = int32_t(packed.wire);
    table->reduced_wire = int32_t(reduced.wire);
    table->count = uint32_t(left < MAX_SEGMENTS ? left : MAX_SEGMENTS);
    table->tiles = 0;
    for (uint32_t i = 0; i < table->count; ++i) {
        const Segment& segment = packed.segments()[first + i];
        table->first_tile[i] = table->tiles;
        table->entries[i] = Entry{segment.start, segment.size,
                                  place_of(packed, first + i), place_of(reduced, first + i)};
        table->tiles += uint32_t((segment.size + WARP_TILE - 1) / WARP_TILE);
    }
}

using Kernel = void(Job);

// `count` rows, of which each `fold` are reordered.
static inline Job job_of(uint8_t* from, uint8_t* to, int64_t count, int64_t fold) {
    Job job = {};
    job.from = from;
    job.to = to;
    job.slices = count / fold;
    job.parts = fold;
    job.terms = 1;
    return job;
}

// The width of all segments that are not raw, or NUM_WIDTHS if there is none or more than one.
static inline Width only_width(const Layout& layout) {
    Width width = NUM_WIDTHS;
    for (int64_t i = 0; i < layout.count; ++i) {
        const Segment& segment = layout.segments()[i];
        if (segment.bits == RAW) continue;
        if (width != NUM_WIDTHS && width != segment.width()) return NUM_WIDTHS;
        width = segment.width();
    }
    return width;
}

// Launch a kernel for the segments of the job's table in all rows. Few tiles are spread over all
// multiprocessors, in smaller thread blocks.
static inline cudaError_t launch_table(Kernel* kernel, Job* job, cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    const int64_t tiles = job->table.tiles * job->slices * job->parts;
    unsigned warps = WARPS;
    while (warps > 1 && tiles < FEW_BLOCKS * warps) warps /= 2;
    const unsigned blocks = (job->table.tiles + warps - 1) / warps;
    for (job->first_part = 0; job->first_part < job->parts; job->first_part += MAX_GRID) {
        const int64_t parts = job->parts - job->first_part;
        for (job->first_slice = 0; job->first_slice < job->slices; job->first_slice += MAX_GRID) {
            const int64_t slices = job->slices - job->first_slice;
            const dim3 grid(blocks, unsigned(slices < MAX_GRID ? slices : MAX_GRID),
                            unsigned(parts < MAX_GRID ? parts : MAX_GRID));
            void* parameters[] = {job};
            error = cudaLaunchKernel(kernel, grid, dim3(warps * LANES), parameters, 0, stream);
            if (error) return error;
        }
    }
    return error;
}

// Launch a kernel for all segments of all rows on the device's `stream`, without waiting. `job` has
// everything but the table.
static inline int64_t launch(Kernel* kernel, Job* job, const Layout& packed, const Layout& reduced,
                             int64_t device, void* stream) {
    cudaError_t error = cudaSetDevice(int(device));
    for (int64_t first = 0; first < packed.count && !error; first += MAX_SEGMENTS) {
        fill(packed, reduced, first, &job->table);
        error = launch_table(kernel, job, static_cast<cudaStream_t>(stream));
    }
    if (error) cudaGetLastError();  // the error is returned, not left behind
    return int64_t(error);
}

}  // namespace zpp
