// Enough of CUDA to run the .cu files of csrc/ on the CPU, warp by warp, to test index arithmetic.
//
// A thread block's threads are contexts that take turns; one that shuffles waits until all of its warp
// have, one at a barrier until all of the block are there. The last warp of a row runs first, so that a
// warp that writes beyond its tile is noticed. Not tested: conversions, multiply-adds and byte
// permutations that are instructions of a GPU, races, and speed. Misaligned accesses are noticed if the
// compiler is told to check them. A grid may have ZPP_MAX_GRID blocks in y and in z, so that few rows
// take several launches.
#pragma once

#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __shared__ static  // thread blocks run one after the other
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)

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
inline const char* cudaGetErrorString(cudaError_t error) {
    return error == 101 ? "invalid device ordinal" : "invalid configuration argument";
}
template <class T> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, T*) { return 0; }
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t) {
    memset(to, value, size);
    return cudaSuccess;
}

namespace emulated {

constexpr int WARP = 32, THREADS = 256;
constexpr size_t STACK = 256 << 10;
inline ucontext_t threads[THREADS];  // where they begin; swapcontext would call the system each time
inline jmp_buf scheduler, paused[THREADS];
inline uint32_t slots[2][THREADS];  // one shuffle may read while the next writes
inline int shuffles[THREADS];
inline bool begun[THREADS], done[THREADS], waits[THREADS];
inline int current;
inline void (*body)(const void*);
inline const void* parameter;

inline void pause() {
    if (!_setjmp(paused[current])) _longjmp(scheduler, 1);
}

// Run the current thread until it pauses or returns.
inline void resume() {
    if (_setjmp(scheduler)) return;
    if (begun[current]) _longjmp(paused[current], 1);
    begun[current] = true;
    setcontext(&threads[current]);
}

// Give a value to the warp's other threads; returns the place of all 32 values.
inline const uint32_t* share(uint32_t value) {
    const int turn = shuffles[current]++ % 2;
    slots[turn][current] = value;
    pause();
    return slots[turn] + current / WARP * WARP;
}

inline uint32_t exchange(uint32_t value, int from) {
    if (from < 0 || from >= WARP) abort();
    return share(value)[from];
}

inline void run_thread() {
    body(parameter);
    done[current] = true;
    _longjmp(scheduler, 1);
}

// Run a warp until its threads have returned or wait at a barrier.
inline void run_warp(int first) {
    while (!done[first] && !waits[first]) {
        for (current = first; current < first + WARP; ++current) {
            resume();
        }
        for (int i = first + 1; i < first + WARP; ++i) {
            if (done[i] != done[first] || waits[i] != waits[first] ||
                shuffles[i] != shuffles[first]) {
                fprintf(stderr, "threads %d and %d of a warp went different ways\n", first, i);
                abort();
            }
        }
    }
}

inline void run_block(int count, char* stacks) {
    for (int i = 0; i < count; ++i) {
        getcontext(&threads[i]);
        threads[i].uc_stack.ss_sp = stacks + i * STACK;
        threads[i].uc_stack.ss_size = STACK;
        makecontext(&threads[i], run_thread, 0);
        shuffles[i] = 0;
        begun[i] = done[i] = waits[i] = false;
    }
    do {
        for (int i = 0; i < count; ++i) waits[i] = false;
        for (int first = count - WARP; first >= 0; first -= WARP) run_warp(first);
        for (int i = 1; i < count; ++i) {
            if (waits[i] != waits[0]) {
                fprintf(stderr, "thread %d is at a barrier that thread %d is not at\n",
                        waits[i] ? i : 0, waits[i] ? 0 : i);
                abort();
            }
        }
    } while (waits[0]);
}

}  // namespace emulated

inline dim3 gridDim, blockDim, blockIdx, threadOf[emulated::THREADS];
#define threadIdx (threadOf[emulated::current])

inline void __syncthreads() {
    emulated::waits[emulated::current] = true;
    emulated::pause();
}

inline uint32_t __shfl_sync(unsigned, uint32_t value, int from) {
    return emulated::exchange(value, from);
}
inline float __shfl_sync(unsigned, float value, int from) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits = emulated::exchange(bits, from);
    memcpy(&value, &bits, 4);
    return value;
}
inline uint32_t __shfl_xor_sync(unsigned, uint32_t value, int mask) {
    return emulated::exchange(value, emulated::current % emulated::WARP ^ mask);
}
inline uint32_t __ballot_sync(unsigned, bool vote) {
    const uint32_t* votes = emulated::share(vote);
    uint32_t ballot = 0;
    for (int i = 0; i < emulated::WARP; ++i) ballot |= votes[i] << i;
    return ballot;
}

inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline unsigned atomicAdd(unsigned* to, unsigned value) {
    const unsigned before = *to;
    *to += value;
    return before;
}

namespace emulated {

// A word of what `result` makes of two words' bytes, as signed or unsigned numbers.
template <class Byte, class Result>
uint32_t by_byte(uint32_t first, uint32_t second, const Result& result) {
    uint32_t word = 0;
    for (int shift = 0; shift < 32; shift += 8) {
        const int value = result(int(Byte(first >> shift)), int(Byte(second >> shift)));
        word |= uint32_t(value & 0xFF) << shift;
    }
    return word;
}

}  // namespace emulated

inline uint32_t __vadd4(uint32_t a, uint32_t b) {
    return emulated::by_byte<uint8_t>(a, b, [](int x, int y) { return x + y; });
}
inline uint32_t __vsub4(uint32_t a, uint32_t b) {
    return emulated::by_byte<uint8_t>(a, b, [](int x, int y) { return x - y; });
}
inline uint32_t __vminu4(uint32_t a, uint32_t b) {
    return emulated::by_byte<uint8_t>(a, b, [](int x, int y) { return x < y ? x : y; });
}
inline uint32_t __vabsdiffs4(uint32_t a, uint32_t b) {
    return emulated::by_byte<int8_t>(a, b, [](int x, int y) { return abs(x - y); });
}
inline uint32_t __vcmplts4(uint32_t a, uint32_t b) {
    return emulated::by_byte<int8_t>(a, b, [](int x, int y) { return x < y ? 0xFF : 0; });
}
inline uint32_t __vcmpgtu4(uint32_t a, uint32_t b) {
    return emulated::by_byte<uint8_t>(a, b, [](int x, int y) { return x > y ? 0xFF : 0; });
}
inline uint32_t __vsetgtu4(uint32_t a, uint32_t b) {
    return emulated::by_byte<uint8_t>(a, b, [](int x, int y) { return x > y; });
}

// The larger of each two halves, as signed or unsigned numbers.
inline uint32_t __vmaxs2(uint32_t a, uint32_t b) {
    const int32_t low = int16_t(a) > int16_t(b) ? int16_t(a) : int16_t(b);
    const int32_t high = int32_t(a) >> 16 > int32_t(b) >> 16 ? int32_t(a) >> 16 : int32_t(b) >> 16;
    return uint32_t(high) << 16 | (uint32_t(low) & 0xFFFFu);
}
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
    const uint32_t low = (a & 0xFFFFu) > (b & 0xFFFFu) ? a & 0xFFFFu : b & 0xFFFFu;
    return (a >> 16 > b >> 16 ? a >> 16 : b >> 16) << 16 | low;
}

template <class A>
cudaError_t cudaLaunchKernel(void (*kernel)(A), dim3 grid, dim3 block, void** parameters, size_t,
                             cudaStream_t) {
    const unsigned most = ZPP_MAX_GRID;
    if (!grid.x || !grid.y || !grid.z || grid.y > most || grid.z > most) return 9;
    static void (*launched)(A);
    static char* stacks = static_cast<char*>(malloc(emulated::THREADS * emulated::STACK));
    launched = kernel;
    emulated::body = [](const void* job) { launched(*static_cast<const A*>(job)); };
    emulated::parameter = parameters[0];
    gridDim = grid;
    blockDim = block;
    for (unsigned i = 0; i < block.x; ++i) threadOf[i] = dim3(i, 0, 0);
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = grid.x; x-- > 0;) {
                blockIdx = dim3(x, y, z);
                emulated::run_block(int(block.x), stacks);
            }
    return cudaSuccess;
}
