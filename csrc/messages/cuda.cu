// Coded messages on a GPU: cpu_coder.cpp writes and reads the same. A warp codes a tile.
//
// Encoding counts symbols, plans tiles, codes them, and joins them to a message.

#include "../shared/cuda_tiles.h"
#include "coder.h"

namespace zpp {

cudaError_t load_coder();

namespace {

constexpr int THREADS = 128, BLOCK_WARPS = THREADS / LANES;
constexpr int64_t MOST_COUNTING = 528;  // thread blocks of a row, in whose counts others wait

struct Warp {
    template <class T> struct Lanes {
        T own;
        ZPP_WARP T& operator[](int) { return own; }
        ZPP_WARP const T& operator[](int) const { return own; }
    };
    int lane = int(threadIdx.x % LANES);

    template <class F> ZPP_WARP void each(const F& body) const { body(lane); }
    template <class F> ZPP_WARP uint32_t vote(const F& bit) const {
        return __ballot_sync(ALL, bit(lane));
    }
    template <class F> ZPP_WARP Lanes<uint32_t> scan(const F& term, uint32_t* total) const {
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
    ZPP_WARP void add(uint32_t* to) const { atomicAdd(to, 1u); }
    ZPP_WARP void copy(void* to, const void* from, int64_t size) const {
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

    ZPP_WARP int64_t index() const { return blockIdx.x / blocks; }
    ZPP_WARP int64_t warp() const {  // of the row's
        return blockIdx.x % blocks * BLOCK_WARPS + threadIdx.x / LANES;
    }
    ZPP_ROW Row row(int64_t index) const { return Row(coding, index, rows, held, coded, scratch); }
};

__global__ void __launch_bounds__(THREADS) count_rows(const __grid_constant__ Job job) {
    __shared__ uint32_t counts[BOTH];
    const Row row = job.row(job.index());
    for (int i = int(threadIdx.x); i < BOTH; i += THREADS) counts[i] = 0;
    __syncthreads();
    for (int64_t step = job.warp(); step < row.steps; step += job.blocks * BLOCK_WARPS) {
        count_step(Warp(), row, step, counts);
    }
    __syncthreads();
    for (int i = int(threadIdx.x); i < BOTH; i += THREADS) {
        if (counts[i]) atomicAdd(row.counts + i, counts[i]);
    }
}

__global__ void __launch_bounds__(LANES) plan_rows(const __grid_constant__ Job job) {
    plan_row(Warp(), job.row(job.index()));
}

__global__ void __launch_bounds__(THREADS) encode_rows(const __grid_constant__ Job job) {
    __shared__ Code codes[BOTH];
    const Row row = job.row(job.index());
    if (blockIdx.x % job.blocks * BLOCK_WARPS >= row.scratch->tiles) return;
    for (int i = int(threadIdx.x); i < BOTH; i += THREADS) {
        codes[i] = code_of(row.scratch->starts[i], row.scratch->frequencies[i]);
    }
    __syncthreads();
    if (job.warp() >= row.scratch->tiles) return;
    encode_tile(Warp(), row, job.warp(), codes);
}

__global__ void __launch_bounds__(THREADS) join_rows(const __grid_constant__ Job job) {
    join_tile(Warp(), job.row(job.index()), job.warp(), job.lengths + job.index());
}

__global__ void __launch_bounds__(LANES) read_headers(const __grid_constant__ Job job) {
    job.status[job.index()] = read_header(Warp(), job.row(job.index()), job.lengths[job.index()]);
}

__global__ void __launch_bounds__(THREADS) decode_rows(const __grid_constant__ Job job) {
    __shared__ uint32_t entries[2 * ONE];
    const Row row = job.row(job.index());
    if (blockIdx.x % job.blocks * BLOCK_WARPS >= row.scratch->tiles) return;
    fill_entries(Warp(), row, int(threadIdx.x / LANES), BLOCK_WARPS, entries);
    __syncthreads();
    if (job.warp() >= row.scratch->tiles) return;
    if (!decode_tile(Warp(), row, job.warp(), entries)) job.status[job.index()] = WRONG_TILE;
}

using CodingKernel = void(Job);
constexpr CodingKernel* KERNELS[] = {count_rows, plan_rows,    encode_rows,
                                     join_rows,  read_headers, decode_rows};

void launch(CodingKernel* kernel, Job* job, int64_t blocks, int threads, void* stream,
            cudaError_t* error) {
    job->blocks = blocks;
    void* parameters[] = {job};
    const dim3 grid(unsigned(blocks * job->coding.rows));
    if (*error) return;
    *error = cudaLaunchKernel(kernel, grid, dim3(threads), parameters, 0, cudaStream_t(stream));
    if (*error) cudaGetLastError();  // it is returned, not left behind
}

int64_t tile_blocks(const Job& job) {
    return (job.row(0).most_tiles() + BLOCK_WARPS - 1) / BLOCK_WARPS;
}

}  // namespace

cudaError_t load_coder() { return load(KERNELS, 6); }

}  // namespace zpp

using namespace zpp;

extern "C" {

// Both launch on the device's `stream` without waiting. There is at least one row.
int64_t zpp_encode(const Coding* coding, uint8_t* rows, const uint8_t* held, uint8_t* coded,
                   int64_t* lengths, uint8_t* scratch, int64_t device, void* stream) {
    Job job{*coding, rows, held, coded, lengths, nullptr, scratch, 0};
    const int64_t tiles = tile_blocks(job);
    const int64_t counting = tiles < MOST_COUNTING ? tiles : MOST_COUNTING;
    const size_t size = size_t(coding->rows) * BOTH * sizeof(uint32_t);
    cudaError_t error = cudaSetDevice(int(device));
    if (!error) error = cudaMemsetAsync(scratch, 0, size, cudaStream_t(stream));
    launch(count_rows, &job, counting, THREADS, stream, &error);
    launch(plan_rows, &job, 1, LANES, stream, &error);
    launch(encode_rows, &job, tiles, THREADS, stream, &error);
    launch(join_rows, &job, tiles, THREADS, stream, &error);
    return int64_t(error);
}

int64_t zpp_decode(const Coding* coding, uint8_t* coded, int64_t* lengths, uint8_t* rows,
                   int32_t* status, uint8_t* scratch, int64_t device, void* stream) {
    Job job{*coding, rows, rows, coded, lengths, status, scratch, 0};
    cudaError_t error = cudaSetDevice(int(device));
    launch(read_headers, &job, 1, LANES, stream, &error);
    launch(decode_rows, &job, tile_blocks(job), THREADS, stream, &error);
    return int64_t(error);
}

}  // extern "C"
