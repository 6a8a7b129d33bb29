// How kernels cut a table of tensors or segments into tiles. A tile is a piece of one entry of the
// table, WARP_TILE elements or what is left of it, and one warp's work.
//
// Tables travel in a kernel's parameters, so that a launch copies nothing to the device and can be
// captured in a CUDA graph. Tables with more entries than fit take several launches.
#pragma once

#include <cuda_runtime.h>

#include "numbers.h"

#define ZPP_DEVICE static __device__ __forceinline__

namespace zpp {

constexpr int MAX_PARAMETERS = 4096;  // bytes of parameters that any toolkit and any GPU takes
constexpr int LANES = 32;
constexpr int WARPS = 8;         // of a thread block, at most; they share nothing
constexpr int WARP_TILE = 1024;  // elements; a multiple of every block
constexpr int PER_LANE = WARP_TILE / LANES;
constexpr unsigned ALL = 0xFFFFFFFFu;

struct Tile {
    int64_t first;  // element of the entry
    int entry, size, lane;
    bool is_last;  // of its entry

    // Index in the tile of the first of VEC adjacent elements that this lane holds in a unit.
    template <int VEC> __device__ __forceinline__ int at(int unit) const {
        return (unit * LANES + lane) * VEC;
    }
};

// Find the tile of this warp in a table whose entries have a `size`; returns false if there is none.
template <class T> ZPP_DEVICE bool find_tile(const T& table, Tile* tile) {
    const uint32_t index = (blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    if (index >= table.tiles) return false;
    uint32_t low = 0, high = table.count;  // low: the last entry known to start early enough
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (table.first_tile[middle] <= index) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const int64_t first = int64_t(index - table.first_tile[low]) * WARP_TILE;
    const int64_t left = table.entries[low].size - first;
    tile->first = first;
    tile->entry = int(low);
    tile->is_last = left <= WARP_TILE;
    tile->size = tile->is_last ? int(left) : WARP_TILE;
    tile->lane = int(threadIdx.x % LANES);
    return true;
}

// Load kernels, so that their first launch can be one that is captured.
template <class K> static inline cudaError_t load(K* const* kernels, int count) {
    cudaError_t error = cudaSuccess;
    cudaFuncAttributes attributes;
    for (int i = 0; i < count && !error; ++i) {
        error = cudaFuncGetAttributes(&attributes, kernels[i]);
    }
    return error;
}

}  // namespace zpp
