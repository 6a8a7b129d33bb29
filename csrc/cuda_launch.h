// The host's side of a launch: layouts cut into tables, grids, errors.
#pragma once

#include "cuda_table.h"

namespace zpp {

static inline Place place_of(const Layout& layout, int64_t index) {
    const Segment& one = layout.segments[index];
    const bool raw = one.bits == RAW;
    bool last = true;  // of those that are raw, or of those that have scales
    for (int64_t i = index + 1; i < layout.count && last; ++i) {
        last = (layout.segments[i].bits == RAW) != raw;
    }
    const int64_t gap = gap_after(raw ? one.raw_end(layout.wire) : one.scales_end());
    return Place{one.scales_at, one.data_at, int32_t(one.bits), last ? int32_t(gap) : 0};
}

// The segments from `first` on, as many as fit. `reduced` may be the same layout.
static inline void fill(const Layout& packed, const Layout& reduced, int64_t first, Table* table) {
    const int64_t left = packed.count - first;
    table->elements = packed.elements;
    table->packed_bytes = packed.packed_bytes;
    table->reduced_bytes = reduced.packed_bytes;
    table->wire = int32_t(packed.wire);
    table->reduced_wire = int32_t(reduced.wire);
    table->count = uint32_t(left < MAX_SEGMENTS ? left : MAX_SEGMENTS);
    table->tiles = 0;
    for (uint32_t i = 0; i < table->count; ++i) {
        const Segment& one = packed.segments[first + i];
        table->first_tile[i] = table->tiles;
        table->entries[i] = Entry{one.start, one.size, place_of(packed, first + i),
                                  place_of(reduced, first + i)};
        table->tiles += uint32_t((one.size + WARP_TILE - 1) / WARP_TILE);
    }
}

using Kernel = void(Job);

// The segments of `job`'s table in all rows.
static inline cudaError_t launch_table(Kernel* kernel, Job* job, cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    const unsigned tiles = (job->table.tiles + WARPS - 1) / WARPS;
    for (job->first_part = 0; job->first_part < job->parts; job->first_part += MAX_GRID) {
        const int64_t parts = job->parts - job->first_part;
        for (job->first_slice = 0; job->first_slice < job->slices; job->first_slice += MAX_GRID) {
            const int64_t slices = job->slices - job->first_slice;
            const dim3 grid(tiles, unsigned(slices < MAX_GRID ? slices : MAX_GRID),
                            unsigned(parts < MAX_GRID ? parts : MAX_GRID));
            void* parameters[] = {job};
            error = cudaLaunchKernel(kernel, grid, dim3(WARPS * LANES), parameters, 0, stream);
            if (error) return error;
        }
    }
    return error;
}

// Loads kernels, so that their first launch may be one that is captured.
template <class K> static inline cudaError_t load(K* const* kernels, int count) {
    cudaError_t error = cudaSuccess;
    cudaFuncAttributes found;
    for (int i = 0; i < count && !error; ++i) error = cudaFuncGetAttributes(&found, kernels[i]);
    return error;
}

cudaError_t load_sums();  // those of cuda_reduce.cu
cudaError_t load_adam();  // those of cuda_adam.cu

// All segments of all rows; `job` has all but the table. On the device's `stream`, nothing waits.
static inline int64_t launch(Kernel* kernel, Job* job, const Layout& packed, const Layout& reduced,
                             int64_t device, void* stream) {
    cudaError_t error = cudaSetDevice(int(device));
    for (int64_t first = 0; first < packed.count && !error; first += MAX_SEGMENTS) {
        fill(packed, reduced, first, &job->table);
        error = launch_table(kernel, job, static_cast<cudaStream_t>(stream));
    }
    if (error) cudaGetLastError();  // forgotten here: it is the caller's now
    return int64_t(error);
}

}  // namespace zpp
