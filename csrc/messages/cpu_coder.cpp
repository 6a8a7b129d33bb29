// Coded messages on the CPU: cuda.cu writes and reads the same.

#include "coder.h"

using namespace zpp;

namespace {

struct Warp {
    template <class T> struct Lanes {
        T of[STATES];
        T& operator[](int lane) { return of[lane]; }
        const T& operator[](int lane) const { return of[lane]; }
    };
    template <class F> void each(const F& body) const {
        for (int lane = 0; lane < STATES; ++lane) body(lane);
    }
    template <class F> uint32_t vote(const F& bit) const {
        uint32_t votes = 0;
        for (int lane = 0; lane < STATES; ++lane) votes |= uint32_t(bool(bit(lane))) << lane;
        return votes;
    }
    template <class F> Lanes<uint32_t> scan(const F& term, uint32_t* total) const {
        Lanes<uint32_t> before;
        for (int lane = 0; lane < STATES; *total += term(lane++)) before[lane] = *total;
        return before;
    }
    void add(uint32_t* to) const { ++*to; }
    void copy(void* to, const void* from, int64_t size) const { memcpy(to, from, size_t(size)); }
};

}  // namespace

extern "C" {

void zpp_encode(const Coding* coding, uint8_t* rows, const uint8_t* held, uint8_t* coded,
                int64_t* lengths, uint8_t* scratch, int64_t) {
    const Warp warp;
    memset(scratch, 0, size_t(coding->rows) * BOTH * sizeof(uint32_t));
    for (int64_t i = 0; i < coding->rows; ++i) {
        const Row row(*coding, i, rows, held, coded, scratch);
        for (int64_t step = 0; step < row.steps; ++step) count_step(warp, row, step, row.counts);
        plan_row(warp, row);
        Code codes[BOTH];
        for (int at = 0; at < BOTH; ++at) {
            codes[at] = code_of(row.scratch->starts[at], row.scratch->frequencies[at]);
        }
        const int64_t tiles = row.scratch->tiles;
        for (int64_t tile = 0; tile < tiles; ++tile) encode_tile(warp, row, tile, codes);
        for (int64_t tile = 0; tile < tiles; ++tile) join_tile(warp, row, tile, lengths + i);
    }
}

void zpp_decode(const Coding* coding, uint8_t* coded, const int64_t* lengths, uint8_t* rows,
                int32_t* status, uint8_t* scratch, int64_t) {
    const Warp warp;
    for (int64_t i = 0; i < coding->rows; ++i) {
        const Row row(*coding, i, rows, rows, coded, scratch);
        status[i] = read_header(warp, row, lengths[i]);
        uint32_t entries[2 * ONE] = {};
        if (status[i] == SOUND) fill_entries(warp, row, 0, 1, entries);
        for (int64_t tile = 0; tile < row.scratch->tiles; ++tile) {
            if (!decode_tile(warp, row, tile, entries)) status[i] = WRONG_TILE;
        }
    }
}

}  // extern "C"
