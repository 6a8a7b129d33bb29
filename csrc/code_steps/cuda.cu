// Steps of codes on the GPU: messages that move packed rows towards rows of values, and their effect.
//
// A thread block has a tile, whose steps are packed together; each of its warps has 4 of its blocks in
// registers, as in quantization. All that warps exchange are digits, which meet in shared memory, and
// counts. Values, codes, scales and messages are read once and written once. A warp that finds steps
// asks for 3 KB at once, or 5 KB of fp32, and a multiprocessor's registers hold 24 such warps; one that
// applies them asks for 1.3 KB, and they hold 40 (csrc/quantize/cuda_tile.h says how much is needed).

#include <vector>

#include "cuda_scales.h"

namespace zpp {
namespace {

constexpr Tiling TILE_PER_BLOCK = {STEP_TILE, 1, STEP_THREADS};
constexpr int COUNTED = 5;  // counts of a message that are not 0
constexpr int THRESHOLDS = COUNTED - 1;
static_assert(THRESHOLDS == 4, "the distances 0, 1, 2 and 4");

// The piece of a tile that is warp `number`'s; it may be empty.
ZPP_DEVICE Tile part_of(const Tile& tile, int number) {
    const int skip = number * WARP_TILE, left = tile.size - skip;
    Tile part = tile;
    part.first += skip;
    part.size = left < 0 ? 0 : left < WARP_TILE ? left : WARP_TILE;
    part.is_last = tile.is_last && left > 0 && left <= WARP_TILE;
    return part;
}

ZPP_DEVICE uint8_t* steps_at(const Place& place, const Tile& tile, int64_t reach,
                             uint8_t* message) {
    const int64_t lanes = tile.first / planes_of(reach);  // a multiple: tiles before it are whole
    return message + place.data_at + lanes * lane_bytes_of(reach);
}

// Counts of a warp: codes that are more than 0, 1, 2 and 4 away from where they belong, two to a word,
// and blocks whose scale changed.
struct Counts {
    uint32_t codes[2], rescaled;
};

ZPP_DEVICE uint32_t sum_of_lanes(uint32_t value) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL, value, step);
    return value;
}

// Digits of a unit; adds to `beyond`, in each byte, how many of its codes are beyond each distance.
template <int VEC>
ZPP_DEVICE Words<VEC> digits_of(const Words<VEC>& codes, const Words<VEC>& held, uint32_t reach,
                                uint32_t* beyond) {
    Words<VEC> digits;
#pragma unroll
    for (int w = 0; w < (VEC + 3) / 4; ++w) {
        const uint32_t distance = __vabsdiffs4(codes.word[w], held.word[w]);
        const uint32_t step = __vminu4(distance, reach * ONES);
        const uint32_t below = step & __vcmplts4(codes.word[w], held.word[w]);
        digits.word[w] = reach * ONES + step - 2 * below;
        beyond[0] += __vsetgtu4(distance, 0);
        beyond[1] += __vsetgtu4(distance, 1 * ONES);
        beyond[2] += __vsetgtu4(distance, 2 * ONES);
        beyond[3] += __vsetgtu4(distance, 4 * ONES);
    }
    return digits;
}

// Write a part's digits, those of step 0 beyond its end, and its new scales.
template <Type T, int VEC>
ZPP_DEVICE Counts find(const uint8_t* values, const uint8_t* codes, const uint8_t* scales,
                       uint32_t reach, const Tile& part, uint8_t* digits, uint8_t* new_scales) {
    Held<VEC> held;
    Coded<INT8, VEC> read;
    read_numbers<T, VEC>(values, part, &held);
    read_codes(codes, scales, part, &read);
    if constexpr (VEC == 2) {  // a unit may be half beyond the end
#pragma unroll
        for (int u = 0; u < Held<VEC>::UNITS; ++u) {
            if (part.at<VEC>(u) + 1 == part.size) read.unit[u].word[0] &= 0xFFu;
        }
    }
    const float chosen = next_scale(held, read, part.lane, reach);
    const uint32_t bits = bits_of(chosen) >> 16;
    if (part.lane * BLOCK8 < part.size) {
        reinterpret_cast<uint16_t*>(new_scales)[part.lane] = uint16_t(bits);
    }
    const float factors = steps_per_unit(bits);
    const float ratios = rescaling(from_bf16(uint16_t(read.scale)), chosen);
    uint32_t beyond[THRESHOLDS] = {};
#pragma unroll
    for (int u = 0; u < Held<VEC>::UNITS; ++u) {
        const int block = u / BlockUnits<VEC>::COUNT;
        const float factor = __shfl_sync(ALL, factors, block);
        const float ratio = __shfl_sync(ALL, ratios, block);
        const Words<VEC> nearest = coded<INT8, VEC>(held.value[u], factor);
        if (ratio != 1.0f) read.unit[u] = rescaled<VEC>(read.unit[u], ratio);
        write_words<VEC>(digits + part.at<VEC>(u),
                         digits_of<VEC>(nearest, read.unit[u], reach, beyond));
    }
    uint32_t sums[THRESHOLDS];
#pragma unroll
    for (int i = 0; i < THRESHOLDS; ++i) sums[i] = beyond[i] * ONES >> 24;
    return {{sum_of_lanes(sums[0] | sums[1] << 16), sum_of_lanes(sums[2] | sums[3] << 16)},
            uint32_t(__popc(__ballot_sync(ALL, bits != read.scale)))};
}

template <Type T, int VEC>
ZPP_DEVICE void send_raw(const uint8_t* values, const Place& place, int wire, const Tile& part,
                         uint8_t* message) {
    Held<VEC> held;
    read_numbers<T, VEC>(values, part, &held);
    put_raw(held, place, wire, part, message);
}

template <Type T>
__global__ void __launch_bounds__(STEP_THREADS) find_steps(const __grid_constant__ Job job) {
    constexpr int SIZE = int(sizeof(typename Element<T>::Word)), VEC = 16 / SIZE;
    alignas(16) __shared__ uint8_t digits[DIGITS];
    __shared__ uint32_t counts[STEP_WARPS][COUNTED];
    const Table& table = job.table;
    const int warp = int(threadIdx.x) / LANES;
    Tile tile;
    if (!find_tile<int(STEP_TILE)>(table, blockIdx.x, &tile)) return;
    const Tile part = part_of(tile, warp);
    const Entry& entry = table.entries[tile.entry];
    const int64_t element = job.row() * table.elements + entry.start + part.first;
    const uint8_t* values = job.from + element * SIZE;
    uint8_t* message = job.to + job.row() * table.reduced_bytes;
    if (entry.packed.bits == RAW) {
        const uint8_t* to = raw_at(entry.reduced, table.wire, part, message);
        if (fits<T, VEC>(values, part.size) && wire_fits<VEC>(table.wire, to, part.size)) {
            return send_raw<T, VEC>(values, entry.reduced, table.wire, part, message);
        }
        return send_raw<T, 2>(values, entry.reduced, table.wire, part, message);
    }
    const uint8_t* packed = job.packed + job.row() * table.packed_bytes;
    const uint8_t* codes = packed + entry.packed.data_at + part.first;
    const uint8_t* scales = packed + entry.packed.scales_at + part.first / BLOCK8 * 2;
    uint8_t* new_scales = scales_at(entry.reduced, part, message);
    uint8_t* own = digits + warp * WARP_TILE;
    const uint32_t reach = uint32_t(job.reach);
    const Counts found = fits<T, VEC>(values, part.size)
                             ? find<T, VEC>(values, codes, scales, reach, part, own, new_scales)
                             : find<T, 2>(values, codes, scales, reach, part, own, new_scales);
    if (part.lane == 0) {
        counts[warp][0] = found.codes[0] & 0xFFFFu;
        counts[warp][1] = found.codes[0] >> 16;
        counts[warp][2] = found.codes[1] & 0xFFFFu;
        counts[warp][3] = found.codes[1] >> 16;
        counts[warp][THRESHOLDS] = found.rescaled;
    }
    clear_gap(entry.reduced, part, new_scales + (part.size + BLOCK8 - 1) / BLOCK8 * 2);
    __syncthreads();
    uint8_t* steps = steps_at(entry.reduced, tile, job.reach, message);
    convert_steps<true>(job.reach, tile.size, digits, steps);
    const int bytes = lanes_of(int(reach), tile.size) * lane_bytes_of(reach);
    if (tile.is_last && threadIdx.x < gap_after(bytes)) steps[bytes + threadIdx.x] = 0;
    if (threadIdx.x < COUNTED) {
        uint32_t sum = 0;
#pragma unroll
        for (int i = 0; i < STEP_WARPS; ++i) sum += counts[i][threadIdx.x];
        if (sum) atomicAdd(reinterpret_cast<unsigned*>(message) + threadIdx.x, sum);
    }
}

// Copy a part's raw values. Both places are equally far from a multiple of 16 bytes.
ZPP_DEVICE void copy_raw(const uint8_t* from, int bytes, int lane, uint8_t* to) {
    const int before = int(gap_after(int64_t(reinterpret_cast<uintptr_t>(to))));
    const int head = before < bytes ? before : bytes;
    const int words = (bytes - head) / 16;
    for (int at = head + lane * 16; at < head + words * 16; at += LANES * 16) {
        write_words<16>(to + at, read_words<16>(from + at));
    }
    if (lane < bytes - words * 16) {
        const int at = lane < head ? lane : lane + words * 16;
        to[at] = from[at];
    }
}

// Four codes after their steps; those beyond the end, of which `left` is the distance, stay.
ZPP_DEVICE uint32_t moved(uint32_t codes, uint32_t digits, uint32_t reach, int left,
                          uint32_t before) {
    const uint32_t after = __vsub4(__vadd4(codes, digits), reach * ONES);
    if (left >= 4) return after;
    const uint32_t keep = left <= 0 ? ~0u : ~0u << 8 * left;
    return (after & ~keep) | (before & keep);
}

__global__ void __launch_bounds__(STEP_THREADS) apply_steps(const __grid_constant__ Job job) {
    constexpr int VEC = 16;
    alignas(16) __shared__ uint8_t digits[DIGITS];
    const Table& table = job.table;
    const int warp = int(threadIdx.x) / LANES;
    Tile tile;
    if (!find_tile<int(STEP_TILE)>(table, blockIdx.x, &tile)) return;
    const Tile part = part_of(tile, warp);
    const Entry& entry = table.entries[tile.entry];
    uint8_t* message = job.from + job.row() * table.reduced_bytes;
    uint8_t* packed = job.to + job.row() * table.packed_bytes;
    if (entry.packed.bits == RAW) {
        return copy_raw(raw_at(entry.reduced, table.wire, part, message),
                        part.size * word_bytes(table.wire), part.lane,
                        raw_at(entry.packed, table.wire, part, packed));
    }
    uint8_t* codes = codes_at(entry.packed, part, packed);
    uint8_t* scales = scales_at(entry.packed, part, packed);
    Coded<INT8, VEC> read;
    read_codes(codes, scales, part, &read);
    const bool has_block = part.lane * BLOCK8 < part.size;
    const uint8_t* sent = scales_at(entry.reduced, part, message);
    const uint16_t bits = has_block ? reinterpret_cast<const uint16_t*>(sent)[part.lane] : 0;
    convert_steps<false>(job.reach, tile.size, digits,
                         steps_at(entry.reduced, tile, job.reach, message));
    const float ratios = rescaling(from_bf16(uint16_t(read.scale)), from_bf16(bits));
    if (has_block) reinterpret_cast<uint16_t*>(scales)[part.lane] = bits;
    __syncthreads();
    const uint32_t reach = uint32_t(job.reach);
#pragma unroll
    for (int u = 0; u < Held<VEC>::UNITS; ++u) {
        const int at = part.at<VEC>(u), left = part.size - at;
        const float ratio = __shfl_sync(ALL, ratios, at / BLOCK8);
        if (left <= 0) continue;
        const Words<VEC> before = read.unit[u];
        Words<VEC> held = ratio == 1.0f ? before : rescaled<VEC>(before, ratio);
        const auto steps = read_words<VEC>(digits + warp * WARP_TILE + at);
#pragma unroll
        for (int w = 0; w < VEC / 4; ++w) {
            held.word[w] = moved(held.word[w], steps.word[w], reach, left - 4 * w, before.word[w]);
        }
        write_words<VEC>(codes + at, held);
    }
}

constexpr Kernel* FIND[NUM_TYPES] = {find_steps<BF16>, find_steps<FP16>, find_steps<FP32>};
constexpr Kernel* APPLY = apply_steps;

// The places of raw values, scales and steps in a message, as a `Layout`.
std::vector<int64_t> places_in(const Layout& rows) {
    const StepLayout& steps = StepLayout::after(rows);
    std::vector<int64_t> table = {rows.elements, steps.num_bytes, rows.wire, rows.count};
    for (int64_t i = 0; i < rows.count; ++i) {
        const Segment& segment = rows.segments()[i];
        const StepSegment& place = steps.segments()[i];
        table.insert(table.end(), {segment.start, segment.size, segment.bits, place.scales_at,
                                   place.data_at});
    }
    return table;
}

// Clear the counts, to which thread blocks add. Row by row: cudaMemset2DAsync takes no messages of 2 GiB.
cudaError_t clear_counts(uint8_t* messages, const StepLayout& layout, int64_t count,
                         cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    for (int64_t row = 0; row < count && !error; ++row) {
        error = cudaMemsetAsync(messages + row * layout.num_bytes, 0, COUNTS * 4, stream);
    }
    return error;
}

int64_t launch_steps(Kernel* kernel, const uint8_t* from, const uint8_t* packed, uint8_t* to,
                     const Layout& rows, int64_t count, int64_t device, void* stream) {
    const std::vector<int64_t> places = places_in(rows);
    Job job = {};
    job.from = const_cast<uint8_t*>(from);
    job.to = to;
    job.packed = packed;
    job.reach = StepLayout::after(rows).reach;
    job.slices = count;
    job.parts = 1;
    return launch(kernel, &job, rows, *reinterpret_cast<const Layout*>(places.data()), device,
                  stream, TILE_PER_BLOCK);
}

}  // namespace

cudaError_t load_code_steps() {
    const cudaError_t error = load(FIND, NUM_TYPES);
    return error ? error : load(&APPLY, 1);
}

}  // namespace zpp

using namespace zpp;

extern "C" {

int64_t zpp_code_steps(const Layout* layout, const uint8_t* rows, int64_t type,
                       const uint8_t* packed, uint8_t* messages, int64_t count, int64_t device,
                       void* stream) {
    cudaError_t error = cudaSetDevice(int(device));
    if (!error) {
        error = clear_counts(messages, StepLayout::after(*layout), count,
                             static_cast<cudaStream_t>(stream));
    }
    if (error) {
        cudaGetLastError();
        return int64_t(error);
    }
    return launch_steps(FIND[type], rows, packed, messages, *layout, count, device, stream);
}

int64_t zpp_apply_code_steps(const Layout* layout, const uint8_t* messages, uint8_t* packed,
                             int64_t count, int64_t device, void* stream) {
    return launch_steps(APPLY, messages, nullptr, packed, *layout, count, device, stream);
}

}  // extern "C"
