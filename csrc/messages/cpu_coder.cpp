// Coded messages on the CPU: cuda.cu writes and reads the same.

#include <atomic>

#include "../shared/threads.h"
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
        for (int lane = 0; lane < STATES; ++lane) {
            before[lane] = *total;
            *total += term(lane);
        }
        return before;
    }
    Lanes<uint32_t> next(const Lanes<uint32_t>& lanes) const {
        Lanes<uint32_t> result;
        for (int lane = 0; lane < STATES; ++lane) result[lane] = lanes[(lane + 1) % STATES];
        return result;
    }
    void add(uint32_t* to) const { ++*to; }
    void copy(void* to, const void* from, int64_t size) const { memcpy(to, from, size_t(size)); }
};

// Call body(index) for indices below `count` on threads that take turns.
template <class F> void in_turns(int64_t threads, int64_t count, const F& body) {
    std::atomic<int64_t> next{0};
    on_threads(threads, [&](int64_t) {
        for (int64_t i; (i = next++) < count;) body(i);
    });
}

}  // namespace

extern "C" {

void zpp_encode(const Coding* coding, uint8_t* rows, const uint8_t* held, uint8_t* coded,
                int64_t* lengths, uint8_t* scratch, int64_t threads) {
    const Warp warp;
    const int64_t useful = useful_threads(threads, coding->size);
    for (int64_t i = 0; i < coding->rows; ++i) {
        const Row row(*coding, i, rows, held, coded, scratch);
        memset(row.counts, 0, TABLES * SYMBOLS * sizeof(uint32_t));
        for (int64_t step = 0; step < row.steps; ++step) count_step(warp, row, step, row.counts);
        plan_row(warp, row);
        Code codes[TABLES * SYMBOLS];
        for (int at = 0; at < TABLES * SYMBOLS; ++at) {
            codes[at] = code_of(row.scratch->starts[at], row.scratch->frequencies[at]);
        }
        in_turns(useful, row.scratch->tiles, [&](int64_t tile) {
            row.scratch->words[tile] = encode_tile(warp, row, tile, codes);
        });
        join_tile(warp, row, 0, lengths + i);
        for (int64_t tile = 1; tile < row.scratch->tiles; ++tile) {
            join_tile(warp, row, tile, lengths + i);
        }
    }
}

void zpp_decode(const Coding* coding, uint8_t* coded, const int64_t* lengths, uint8_t* rows,
                int32_t* status, uint8_t* scratch, int64_t threads) {
    const Warp warp;
    const int64_t useful = useful_threads(threads, coding->size);
    for (int64_t i = 0; i < coding->rows; ++i) {
        const Row row(*coding, i, rows, rows, coded, scratch);
        status[i] = read_header(warp, row, lengths[i]);
        if (status[i] != SOUND) continue;
        uint32_t entries[TABLES * ONE] = {};
        fill_entries(warp, row, 0, 1, entries);
        std::atomic<bool> is_wrong{false};
        in_turns(useful, row.scratch->tiles, [&](int64_t tile) {
            if (!decode_tile(warp, row, tile, entries)) is_wrong = true;
        });
        if (is_wrong) status[i] = WRONG_TILE;
    }
}

}  // extern "C"
