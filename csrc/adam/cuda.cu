// Adam on the GPU, on many tensors: unscaling, clipping, the update and the 16-bit copy in one pass
// over memory.
//
// A tile is a piece of one tensor. A lane requests IN_FLIGHT elements of each of the four arrays
// before it uses any: 128 bytes with fp32 gradients. The 24 warps that a multiprocessor's registers
// hold then wait for 98 KB (csrc/quantize/cuda_tile.h says how much is needed).

#include "../shared/cuda_numbers.h"
#include "call.h"

namespace zpp {
namespace {

constexpr int MAX_TENSORS = 76;  // of one launch
constexpr int IN_FLIGHT = 8;     // elements of a lane

struct AdamJob {
    uint32_t count, tiles;
    uint32_t first_tile[MAX_TENSORS];
    AdamTensor entries[MAX_TENSORS];
    const float* factor;
    AdamScalars scalars;
    int32_t copy_type;
};
static_assert(sizeof(AdamJob) <= MAX_PARAMETERS, "parameters of a kernel");

// VEC adjacent elements; one by one where wider accesses may not touch them.
template <Type T, int VEC> ZPP_DEVICE void read_unit(const uint8_t* from, float* values) {
    if constexpr (VEC == 1) {
        values[0] = to_float<T>(read_one<T>(from));
    } else {
        Numbers<T, VEC> unit;
        unit.read(from);
#pragma unroll
        for (int i = 0; i < VEC; ++i) values[i] = unit.get(i);
    }
}

template <Type T, int VEC> ZPP_DEVICE void write_unit(const float* values, uint8_t* to) {
    if constexpr (VEC == 1) {
        using Word = typename Element<T>::Word;
        uint32_t word = bits_of(values[0]);
        if constexpr (T == BF16) word = to_bf16_pair(values[0], 0.0f);
        if constexpr (T == FP16) word = to_fp16_pair(values[0], 0.0f);
        *reinterpret_cast<Word*>(to) = Word(word);
    } else {
        Numbers<T, VEC> unit;
#pragma unroll
        for (int i = 0; i < VEC; i += 2) unit.set_pair(i, values[i], values[i + 1]);
        unit.write(to);
    }
}

template <int VEC> ZPP_DEVICE void read_floats(const float* from, float* values) {
    read_unit<FP32, VEC>(reinterpret_cast<const uint8_t*>(from), values);
}
template <int VEC> ZPP_DEVICE void write_floats(const float* values, float* to) {
    write_unit<FP32, VEC>(values, reinterpret_cast<uint8_t*>(to));
}

// The start of a tile in each array.
template <Type G> ZPP_DEVICE AdamTensor piece_of(const AdamTensor& whole, const Tile& tile) {
    AdamTensor piece = whole;
    piece.gradient += tile.first * int(sizeof(typename Element<G>::Word));
    piece.parameter += tile.first;
    piece.mean += tile.first;
    piece.square += tile.first;
    if (whole.copy) piece.copy += tile.first * 2;
    return piece;
}

template <int VEC> struct Unit {
    float gradient[VEC], parameter[VEC], mean[VEC], square[VEC];
};

template <Type G, int VEC>
ZPP_DEVICE void read_all(const AdamTensor& piece, int at, Unit<VEC>* unit) {
    constexpr int SIZE = int(sizeof(typename Element<G>::Word));
    read_unit<G, VEC>(piece.gradient + at * SIZE, unit->gradient);
    read_floats<VEC>(piece.parameter + at, unit->parameter);
    read_floats<VEC>(piece.mean + at, unit->mean);
    read_floats<VEC>(piece.square + at, unit->square);
}

template <int VEC>
ZPP_DEVICE void write_all(const Unit<VEC>& unit, int copy_type, int at, const AdamTensor& piece) {
    write_floats<VEC>(unit.parameter, piece.parameter + at);
    write_floats<VEC>(unit.mean, piece.mean + at);
    write_floats<VEC>(unit.square, piece.square + at);
    if (!piece.copy) return;
    if (copy_type == BF16) {
        write_unit<BF16, VEC>(unit.parameter, piece.copy + at * 2);
    } else {
        write_unit<FP16, VEC>(unit.parameter, piece.copy + at * 2);
    }
}

template <Type G, int VEC>
ZPP_DEVICE void update_tile(const AdamJob& job, const AdamTensor& piece, const Tile& tile,
                            float factor) {
    constexpr int UNITS = IN_FLIGHT / VEC;
#pragma unroll 1
    for (int first = 0; first < PER_LANE / VEC; first += UNITS) {
        Unit<VEC> units[UNITS];
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            const int at = tile.at<VEC>(first + u);
            if (at < tile.size) read_all<G, VEC>(piece, at, &units[u]);
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            const int at = tile.at<VEC>(first + u);
            if (at >= tile.size) return;
            Unit<VEC>& unit = units[u];
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                adam_update(job.scalars, unit.gradient[i] * factor, &unit.parameter[i],
                            &unit.mean[i], &unit.square[i]);
            }
            write_all(unit, job.copy_type, at, piece);
        }
    }
}

template <Type G, int VEC> ZPP_DEVICE bool all_fit(const AdamTensor& piece, int size) {
    const uintptr_t floats = reinterpret_cast<uintptr_t>(piece.parameter) |
                             reinterpret_cast<uintptr_t>(piece.mean) |
                             reinterpret_cast<uintptr_t>(piece.square);
    return fits<FP32, VEC>(reinterpret_cast<const uint8_t*>(floats), size) &&
           fits<G, VEC>(piece.gradient, size) && fits<BF16, VEC>(piece.copy, size);
}

// All or nothing: each warp checks the factor before it writes.
template <Type G>
__global__ void __launch_bounds__(WARPS * LANES) adam_tensors(const __grid_constant__ AdamJob job) {
    Tile tile;
    if (!find_tile(job, &tile)) return;
    const float factor = job.factor ? *job.factor : 1.0f;
    if (!is_finite(factor)) return;
    const AdamTensor piece = piece_of<G>(job.entries[tile.entry], tile);
    if (all_fit<G, 4>(piece, tile.size)) {
        update_tile<G, 4>(job, piece, tile, factor);
    } else {
        update_tile<G, 1>(job, piece, tile, factor);
    }
}

using AdamKernel = void(AdamJob);
constexpr AdamKernel* ADAM[NUM_TYPES] = {adam_tensors<BF16>, adam_tensors<FP16>,
                                         adam_tensors<FP32>};

// Fill the job with the tensors from `first` on, as many as fit; returns how many.
int64_t fill(const AdamCall& call, int64_t first, AdamJob* job) {
    const int64_t left = call.count - first;
    job->count = uint32_t(left < MAX_TENSORS ? left : MAX_TENSORS);
    job->tiles = 0;
    for (uint32_t i = 0; i < job->count; ++i) {
        const AdamTensor& tensor = call.tensors[first + i];
        job->first_tile[i] = job->tiles;
        job->entries[i] = tensor;
        job->tiles += uint32_t((tensor.size + WARP_TILE - 1) / WARP_TILE);
    }
    return job->count;
}

}  // namespace

cudaError_t load_adam() { return load(ADAM, NUM_TYPES); }

}  // namespace zpp

using namespace zpp;

extern "C" {

// Launches on the device's `stream` without waiting. No tensor may be empty.
int64_t zpp_adam(const AdamCall* call, int64_t device, void* stream) {
    AdamJob job;
    job.factor = call->factor;
    job.scalars = call->scalars;
    job.copy_type = int32_t(call->copy_type);
    cudaError_t error = cudaSetDevice(int(device));
    for (int64_t first = 0; first < call->count && !error;) {
        first += fill(*call, first, &job);
        void* parameters[] = {&job};
        const dim3 grid((job.tiles + WARPS - 1) / WARPS);
        error = cudaLaunchKernel(ADAM[call->gradient_type], grid, dim3(WARPS * LANES), parameters,
                                 0, static_cast<cudaStream_t>(stream));
    }
    if (error) cudaGetLastError();
    return int64_t(error);
}

}  // extern "C"
