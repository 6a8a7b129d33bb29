// Enough of CUDA to run the .cu files of csrc/ on the CPU, warp by warp, to test index arithmetic.
//
// A warp's 32 threads are 32 contexts that take turns; one that shuffles waits until all have. The
// last warp of a row runs first, so that a warp that writes beyond its tile is noticed. Not tested:
// conversions, multiply-adds and byte permutations that are instructions of a GPU, races, and speed.
// Misaligned accesses are noticed if the compiler is told to check them.
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
using cudaError_t = int;
using cudaStream_t = void*;
struct cudaFuncAttributes {};
constexpr cudaError_t cudaSuccess = 0;
inline cudaError_t cudaSetDevice(int device) { return device == 0 ? 0 : 101; }
inline cudaError_t cudaGetLastError() { return 0; }
inline const char* cudaGetErrorString(cudaError_t) { return "invalid device ordinal"; }
template <class T> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, T*) { return 0; }

namespace emulated {

constexpr int WARP = 32;
constexpr size_t STACK = 256 << 10;
inline ucontext_t scheduler, lanes[WARP];
inline uint32_t slots[2][WARP];  // one shuffle may read while the next writes
inline int shuffles[WARP];
inline bool done[WARP];
inline int current;
inline void (*body)(const void*);
inline const void* parameter;

inline uint32_t exchange(uint32_t value, int from) {
    const int turn = shuffles[current]++ % 2;
    slots[turn][current] = value;
    swapcontext(&lanes[current], &scheduler);
    if (from < 0 || from >= WARP) abort();
    return slots[turn][from];
}

inline void run_lane() {
    body(parameter);
    done[current] = true;
}

inline void run_warp(char* stacks) {
    for (int i = 0; i < WARP; ++i) {
        getcontext(&lanes[i]);
        lanes[i].uc_stack.ss_sp = stacks + i * STACK;
        lanes[i].uc_stack.ss_size = STACK;
        lanes[i].uc_link = &scheduler;
        makecontext(&lanes[i], run_lane, 0);
        shuffles[i] = 0;
        done[i] = false;
    }
    while (!done[0]) {
        for (current = 0; current < WARP; ++current) swapcontext(&scheduler, &lanes[current]);
        for (int i = 1; i < WARP; ++i) {
            if (done[i] != done[0] || shuffles[i] != shuffles[0]) {
                fprintf(stderr, "lanes 0 and %d of a warp went different ways\n", i);
                abort();
            }
        }
    }
}

}  // namespace emulated

inline dim3 gridDim, blockIdx, threadOfLane[emulated::WARP];
#define threadIdx (threadOfLane[emulated::current])

inline uint32_t __shfl_sync(unsigned, uint32_t value, int from) {
    return emulated::exchange(value, from);
}
inline float __shfl_sync(unsigned, float value, int from) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    bits = emulated::exchange(bits, from);
    __builtin_memcpy(&value, &bits, 4);
    return value;
}
inline uint32_t __shfl_xor_sync(unsigned, uint32_t value, int mask) {
    return emulated::exchange(value, emulated::current ^ mask);
}

template <class A>
cudaError_t cudaLaunchKernel(void (*kernel)(A), dim3 grid, dim3 block, void** parameters, size_t,
                             cudaStream_t) {
    static void (*launched)(A);
    static char* stacks = static_cast<char*>(malloc(emulated::WARP * emulated::STACK));
    launched = kernel;
    emulated::body = [](const void* job) { launched(*static_cast<const A*>(job)); };
    emulated::parameter = parameters[0];
    gridDim = grid;
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = grid.x; x-- > 0;)
                for (unsigned warp = block.x / emulated::WARP; warp-- > 0;) {
                    blockIdx = dim3(x, y, z);
                    for (unsigned i = 0; i < emulated::WARP; ++i) {
                        threadOfLane[i] = dim3(warp * emulated::WARP + i, 0, 0);
                    }
                    emulated::run_warp(stacks);
                }
    return cudaSuccess;
}
