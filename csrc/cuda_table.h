// A layout as kernels get it: in their parameters, so that a launch copies nothing to the device
// and can be captured in a CUDA graph. Layouts of more segments than fit take several launches.
//
// A tile is a piece of one segment, WARP_TILE elements or what is left of it, and one warp's work.
#pragma once

#include <cuda_runtime.h>

#include "format.h"

#define ZPP_DEVICE static __device__ __forceinline__

namespace zpp {

constexpr int MAX_SEGMENTS = 56;   // of one launch
constexpr int MAX_PARAMETERS = 4096;  // bytes that any toolkit and any GPU takes
constexpr int LANES = 32;
constexpr int WARPS = 8;           // of a thread block; they share nothing
constexpr int WARP_TILE = 1024;    // elements; a multiple of every block
constexpr int PER_LANE = WARP_TILE / LANES;
constexpr unsigned ALL = 0xFFFFFFFFu;
constexpr int64_t MAX_GRID = 65535;  // in y and z

// A segment's place in a packed row. Behind its scales, or its raw values, are `gap` bytes that
// hold nothing; behind its codes are those up to the next aligned place.
struct Place {
    int64_t scales_at, data_at;
    int32_t bits, gap;
};

struct Entry {
    int64_t start, size;
    Place packed, reduced;  // `reduced` for reduce_quantize only
};

struct Table {
    int64_t elements, packed_bytes, reduced_bytes;
    int32_t wire, reduced_wire;
    uint32_t count, tiles;
    uint32_t first_tile[MAX_SEGMENTS];
    Entry entries[MAX_SEGMENTS];
};

// Packed row k = part * slices + slice belongs to the row slice * parts + part of values. A grid
// has the tiles of a row in x, slices in y and parts in z, both from a first one on.
struct Job {
    Table table;
    uint8_t *from, *to;
    int64_t slices, parts, first_slice, first_part;
    int64_t terms, stride;  // of a sum; bytes from one term to the next

    __device__ __forceinline__ int64_t slice() const { return first_slice + blockIdx.y; }
    __device__ __forceinline__ int64_t part() const { return first_part + blockIdx.z; }
    __device__ __forceinline__ int64_t packed_row() const { return part() * slices + slice(); }
    __device__ __forceinline__ int64_t row() const { return slice() * parts + part(); }
};
static_assert(sizeof(Job) <= MAX_PARAMETERS, "parameters of a kernel");

struct Tile {
    int64_t first;  // element of the segment
    int entry, size, lane;
    bool is_last;  // of its segment

    // Elements that come before this lane's in the tile, if it holds VEC beside each other.
    template <int VEC> __device__ __forceinline__ int at(int unit) const {
        return (unit * LANES + lane) * VEC;
    }
};

// The tile of this warp in a table of entries that have a `size`; false if there is none.
template <class T> ZPP_DEVICE bool find_tile(const T& table, Tile* tile) {
    const uint32_t index = blockIdx.x * WARPS + threadIdx.x / LANES;
    if (index >= table.tiles) return false;
    uint32_t low = 0, high = table.count;  // low: the last entry found to begin early enough
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

ZPP_DEVICE int word_bytes(int wire) { return wire == FP32 ? 4 : 2; }

ZPP_DEVICE uint8_t* raw_at(const Place& place, int wire, const Tile& tile, uint8_t* packed) {
    return packed + place.data_at + tile.first * word_bytes(wire);
}
ZPP_DEVICE uint8_t* codes_at(const Place& place, const Tile& tile, uint8_t* packed) {
    return packed + place.data_at + tile.first * place.bits / 8;
}
ZPP_DEVICE uint8_t* scales_at(const Place& place, const Tile& tile, uint8_t* packed) {
    return packed + place.scales_at + tile.first / (place.bits == 8 ? BLOCK8 : BLOCK4) * 2;
}

}  // namespace zpp
