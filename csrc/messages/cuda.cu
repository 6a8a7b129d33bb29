// Coded messages on a GPU: cpu_coder.cpp writes and reads the same. A warp codes a tile.
//
// Encoding counts symbols, plans tiles, codes them, and joins them to a message; nothing waits for a
// length.

#include "../shared/cuda_tiles.h"
#include "coder.h"

namespace zpp {

cudaError_t load_coder();

namespace {

constexpr int THREADS = 128, BLOCK_WARPS = THREADS / LANES;
constexpr int64_t COUNTED_STEPS = 64;  // of a warp, at least
constexpr int64_t MOST_COUNTING = 528;  // thread blocks of a row, in whose counts others wait

struct Warp {
    template <class T> struct Lanes {
        T own;
        __device__ __forceinline__ T& operator[](int) { return own; }
        __device__ __forceinline__ const T& operator[](int) const { return own; }
    };
    int lane = int(threadIdx.x % LANES);

    template <class F> __device__ __forceinline__ void each(const F& body) const { body(lane); }
    template <class F> __device__ __forceinline__ uint32_t vote(const F& bit) const {
        return __ballot_sync(ALL, bit(lane));
    }
    template <class F>
    __device__ __forceinline__ Lanes<uint32_t> scan(const F& term, uint32_t* total) const {
        const uint32_t own = term(lane);
        uint32_t sum = own;
        for (int step = 1; step < LANES; step *= 2) {
            const uint32_t below = __shfl_sync(ALL, sum, lane < step ? 0 : lane - step);
            sum += lane < step ? 0 : below;
        }
        const uint32_t before = *total + sum - own;
        *total += __shfl_sync(ALL, sum, LANES - 1);
        return {before};
    }
    __device__ __forceinline__ Lanes<uint32_t> next(const Lanes<uint32_t>& lanes) const {
        return {__shfl_sync(ALL, lanes.own, (lane + 1) % LANES)};
    }
    __device__ __forceinline__ void add(uint32_t* to) const { atomicAdd(to, 1u); }
    __device__ __forceinline__ void copy(void* to, const void* from, int64_t size) const {
        for (int64_t i = lane; i < size / 2; i += LANES) {
            static_cast<uint16_t*>(to)[i] = static_cast<const uint16_t*>(from)[i];
        }
    }
};

// A grid has `blocks` thread blocks for each row.
struct Job {
    Coding coding;
    uint8_t* rows;
    const uint8_t* held;
    uint8_t* coded;
    int64_t* lengths;
    int32_t* status;
    uint8_t* scratch;
    int64_t blocks;

    __device__ __forceinline__ int64_t index() const { return blockIdx.x / blocks; }
    __device__ __forceinline__ Row row() const {
        return Row(coding, index(), rows, held, coded, scratch);
    }
    __device__ __forceinline__ int64_t warp() const {  // of the row's
        return blockIdx.x % blocks * BLOCK_WARPS + threadIdx.x / LANES;
    }
    // Whether no warp of the block has a tile; the same for all of its threads.
    __device__ __forceinline__ bool is_beyond(const Row& row) const {
        return blockIdx.x % blocks * BLOCK_WARPS >= row.scratch->tiles;
    }
};

__global__ void __launch_bounds__(THREADS) count_rows(const __grid_constant__ Job job) {
    __shared__ uint32_t counts[TABLES * SYMBOLS];
    const Row row = job.row();
    for (int i = int(threadIdx.x); i < TABLES * SYMBOLS; i += THREADS) counts[i] = 0;
    __syncthreads();
    for (int64_t step = job.warp(); step < row.steps; step += job.blocks * BLOCK_WARPS) {
        count_step(Warp(), row, step, counts);
    }
    __syncthreads();
    for (int i = int(threadIdx.x); i < TABLES * SYMBOLS; i += THREADS) {
        if (counts[i]) atomicAdd(row.counts + i, counts[i]);
    }
}

__global__ void __launch_bounds__(LANES) plan_rows(const __grid_constant__ Job job) {
    plan_row(Warp(), job.row());
}

__global__ void __launch_bounds__(THREADS) encode_rows(const __grid_constant__ Job job) {
    __shared__ Code codes[TABLES * SYMBOLS];
    const Row row = job.row();
    if (job.is_beyond(row)) return;
    for (int i = int(threadIdx.x); i < TABLES * SYMBOLS; i += THREADS) {
        codes[i] = code_of(row.scratch->starts[i], row.scratch->frequencies[i]);
    }
    __syncthreads();
    if (job.warp() >= row.scratch->tiles) return;
    row.scratch->words[job.warp()] = encode_tile(Warp(), row, job.warp(), codes);
}

__global__ void __launch_bounds__(THREADS) join_rows(const __grid_constant__ Job job) {
    join_tile(Warp(), job.row(), job.warp(), job.lengths + job.index());
}

__global__ void __launch_bounds__(LANES) read_headers(const __grid_constant__ Job job) {
    job.status[job.index()] = read_header(Warp(), job.row(), job.lengths[job.index()]);
}

__global__ void __launch_bounds__(THREADS) decode_rows(const __grid_constant__ Job job) {
    __shared__ uint32_t entries[TABLES * ONE];
    const Row row = job.row();
    if (job.is_beyond(row)) return;
    fill_entries(Warp(), row, int(threadIdx.x / LANES), BLOCK_WARPS, entries);
    __syncthreads();
    if (job.warp() >= row.scratch->tiles) return;
    if (!decode_tile(Warp(), row, job.warp(), entries)) job.status[job.index()] = WRONG_TILE;
}

using CodingKernel = void(Job);
constexpr CodingKernel* KERNELS[] = {count_rows, plan_rows,    encode_rows,
                                     join_rows,  read_headers, decode_rows};

struct Launch {
    Job job;
    cudaStream_t stream;
    cudaError_t error;

    Launch& operator()(CodingKernel* kernel, int64_t blocks, int threads) {
        job.blocks = blocks;
        void* parameters[] = {&job};
        const dim3 grid(unsigned(blocks * job.coding.rows));
        if (!error) error = cudaLaunchKernel(kernel, grid, dim3(threads), parameters, 0, stream);
        return *this;
    }
    int64_t result() const {
        if (error) cudaGetLastError();  // it is returned, not left behind
        return int64_t(error);
    }
};

}  // namespace

cudaError_t load_coder() { return load(KERNELS, 6); }

}  // namespace zpp

using namespace zpp;

extern "C" {

// Both launch on the device's `stream` without waiting. There is at least one row.
int64_t zpp_encode(const Coding* coding, uint8_t* rows, const uint8_t* held, uint8_t* coded,
                   int64_t* lengths, uint8_t* scratch, int64_t device, void* stream) {
    const Row row(*coding, 0, rows, held, coded, scratch);
    const int64_t tiles = (row.most_tiles() + BLOCK_WARPS - 1) / BLOCK_WARPS;
    const int64_t counting = row.steps / (COUNTED_STEPS * BLOCK_WARPS) + 1;
    Launch launch{{*coding, rows, held, coded, lengths, nullptr, scratch, 0},
                  static_cast<cudaStream_t>(stream), cudaSetDevice(int(device))};
    const size_t size = size_t(coding->rows) * TABLES * SYMBOLS * sizeof(uint32_t);
    if (!launch.error) launch.error = cudaMemsetAsync(scratch, 0, size, launch.stream);
    launch(count_rows, counting < MOST_COUNTING ? counting : MOST_COUNTING, THREADS);
    launch(plan_rows, 1, LANES);
    return launch(encode_rows, tiles, THREADS)(join_rows, tiles, THREADS).result();
}

int64_t zpp_decode(const Coding* coding, uint8_t* coded, int64_t* lengths, uint8_t* rows,
                   int32_t* status, uint8_t* scratch, int64_t device, void* stream) {
    const Row row(*coding, 0, rows, rows, coded, scratch);
    const int64_t tiles = (row.most_tiles() + BLOCK_WARPS - 1) / BLOCK_WARPS;
    Launch launch{{*coding, rows, rows, coded, lengths, status, scratch, 0},
                  static_cast<cudaStream_t>(stream), cudaSetDevice(int(device))};
    return launch(read_headers, 1, LANES)(decode_rows, tiles, THREADS).result();
}

}  // extern "C"
