// How rows are coded, on host and device.
//
// W is a warp: of a GPU, whose threads have a lane each, or of a CPU, which has all 32. W::Lanes<T> is
// a T for each lane; `each` calls a function with each lane, `vote` collects a bit of each, `scan`
// returns the sums over the lanes before, from a total on, to which it adds all.
#pragma once

#include "math.h"

#ifdef __CUDACC__
#define ZPP_WARP __device__ __forceinline__
#define ZPP_UNROLL _Pragma("unroll")
#else
#define ZPP_WARP inline
#define ZPP_UNROLL
#endif

namespace zpp {

constexpr int AHEAD = 8;  // steps of a tile that are read before the first of them is coded

struct Symbol {
    uint32_t at;  // among those of both tables; NOTHING after the row's end
    uint32_t others, value;  // of each byte: whether it is an other, the difference; or the byte
};

ZPP_WARP Symbol read_symbol(const Row& row, int64_t index) {
    if (index * row.width >= row.coding.size) return Symbol{NOTHING, 0, 0};
    if (row.width == 1) {
        return Symbol{SYMBOLS * row.table_of(index) + row.row[index], 0, row.row[index]};
    }
    const uint32_t value = minus_bytes(word_at(row.row + 4 * index), word_at(row.held + 4 * index));
    const uint32_t symbol = symbol_of(value);
    return Symbol{symbol, bytes_with(symbol, 3), value};
}

template <class W, class F> ZPP_WARP uint32_t sum(const W& warp, int64_t count, const F& term) {
    typename W::template Lanes<uint32_t> parts;
    warp.each([&](int lane) {
        parts[lane] = 0;
        for (int64_t i = lane; i < count; i += STATES) parts[lane] += term(i);
    });
    uint32_t total = 0;
    warp.scan([&](int lane) { return parts[lane]; }, &total);
    return total;
}

template <class W>
ZPP_WARP void count_step(const W& warp, const Row& row, int64_t step, uint32_t* counts) {
    warp.each([&](int lane) {
        Symbol symbol = read_symbol(row, step * STATES + lane);
        if (symbol.at == NOTHING) return;
        warp.add(counts + symbol.at);
        for (; symbol.others; symbol.others >>= 8, symbol.value >>= 8) {
            if (symbol.others & 1) warp.add(counts + SYMBOLS + (symbol.value & 255));
        }
    });
}

// Levels -> starts and frequencies of symbols, which are at least 1 and ONE in all. Returns false if
// the levels are of more symbols than a row can have.
template <class W>
ZPP_WARP bool make_tables(const W& warp, Scratch* scratch, const uint8_t* levels) {
    uint32_t wrong = 0;
    for (int at = 0; at < BOTH; at += SYMBOLS, levels += SYMBOLS) {
        const auto counted = [&](int64_t i) { return count_of(levels[i]); };
        const uint32_t least = sum(warp, SYMBOLS, counted) / (ONE - SYMBOLS) + 1;
        const auto count = [&](int64_t i) {
            const uint32_t of = count_of(levels[i]);
            return !of || of > least ? of : least;
        };
        const uint64_t all = sum(warp, SYMBOLS, count);
        uint32_t total = 0;
        for (int first = 0; first < SYMBOLS; first += STATES) {
            const auto before = warp.scan([&](int lane) { return count(first + lane); }, &total);
            wrong |= warp.vote([&](int lane) {
                const uint64_t end = uint64_t(before[lane]) + count(first + lane);
                const uint64_t start = all ? before[lane] * uint64_t(ONE) / all : 0;
                const uint64_t frequency = all ? end * ONE / all - start : 0;
                scratch->starts[at + first + lane] = uint32_t(start);
                scratch->frequencies[at + first + lane] = uint32_t(frequency);
                return start + frequency > ONE;
            });
        }
    }
    return !wrong;
}

// Counts -> tables, and how large tiles are.
template <class W> ZPP_WARP void plan_row(const W& warp, const Row& row) {
    Scratch* scratch = row.scratch;
    warp.each([&](int lane) {
        for (int i = lane; i < BOTH; i += STATES) scratch->levels[i] = level_of(row.counts[i]);
    });
    make_tables(warp, scratch, scratch->levels);
    row.plan(sum(warp, BOTH, [&](int64_t i) {
        return row.counts[i] ? bytes_of(row.counts[i], scratch->frequencies[i]) : 0;
    }));
}

// Codes a tile from the last word to the first.
template <class W>
ZPP_WARP void encode_tile(const W& warp, const Row& row, int64_t tile, const Code* codes) {
    typename W::template Lanes<uint32_t> states, checks;
    uint16_t* at = row.words_end(tile);
    const auto put = [&](const auto& symbol_in) {  // unless a lane's is NOTHING
        const uint32_t full = warp.vote([&](int lane) {
            const uint32_t symbol = symbol_in(lane);
            return symbol != NOTHING && states[lane] >= limit_of(codes[symbol]);
        });
        at -= popcount(full);
        warp.each([&](int lane) {
            const bool is_full = full >> lane & 1;
            if (is_full) at[rank_of(full, lane)] = uint16_t(states[lane]);
            states[lane] >>= is_full ? 16 : 0;
            const uint32_t symbol = symbol_in(lane);
            if (symbol != NOTHING) states[lane] = encoded(states[lane], codes[symbol]);
        });
    };
    warp.each([&](int lane) {
        states[lane] = LOWEST;
        checks[lane] = 0;
    });
    const int64_t first = row.step_at(tile);
    for (int64_t step = row.step_at(tile + 1) - 1; step >= first; step -= AHEAD) {
        typename W::template Lanes<Symbol> ahead[AHEAD];
        ZPP_UNROLL for (int i = 0; i < AHEAD; ++i) {
            const int64_t index = step - i < first ? row.coding.size : (step - i) * STATES;
            warp.each([&](int lane) {
                ahead[i][lane] = read_symbol(row, index + lane);
                checks[lane] += check_of(ahead[i][lane].value, index + lane);
            });
        }
        ZPP_UNROLL for (int i = 0; i < AHEAD; ++i) {
            const auto& symbols = ahead[i];
            const bool any = warp.vote([&](int lane) { return symbols[lane].others != 0; });
            for (int shift = 24; any && shift >= 0; shift -= 8) {
                put([&](int lane) {
                    const uint32_t other = SYMBOLS + (symbols[lane].value >> shift & 255);
                    return symbols[lane].others >> shift & 1 ? other : NOTHING;
                });
            }
            put([&](int lane) { return symbols[lane].at; });
        }
    }
    const uint32_t check = sum(warp, STATES, [&](int64_t lane) { return checks[int(lane)]; });
    at -= STATE_WORDS;
    warp.each([&](int lane) {
        at[lane] = uint16_t(states[lane]);
        at[STATES + lane] = uint16_t(states[lane] >> 16);
        at[2 * STATES + lane % 2] = uint16_t(check >> lane % 2 * 16);
    });
    row.scratch->words[tile] = uint32_t(row.words_end(tile) - at);
}

// Copies a tile to where it belongs in the message, the first also header and tables.
template <class W>
ZPP_WARP void join_tile(const W& warp, const Row& row, int64_t tile, int64_t* length) {
    const Scratch& scratch = *row.scratch;
    if (tile >= scratch.tiles) return;
    const auto words = [&](int64_t i) { return scratch.words[i]; };
    const uint32_t end = sum(warp, tile + 1, words), all = sum(warp, scratch.tiles, words);
    const int64_t tiles_at = ENDS_AT + 4 * scratch.tiles, coded = tiles_at + int64_t(2) * all;
    const int64_t stored = HEADER_BYTES + row.coding.size, from = row.byte_at(tile);
    const bool is_stored = coded >= stored;
    if (!tile) {
        *length = is_stored ? stored : coded;  // by every lane
        row.header()[LENGTH] = uint32_t(*length);
        row.header()[KIND] = FORMAT | uint32_t(is_stored ? STORED : row.coding.kind);
        row.header()[STEPS] = uint32_t(scratch.steps);
        row.header()[SIZE] = uint32_t(row.coding.size);
    }
    if (is_stored) {
        return warp.copy(row.message + HEADER_BYTES + from, row.row + from,
                         row.byte_at(tile + 1) - from);
    }
    const uint32_t own = scratch.words[tile];
    if (!tile) warp.copy(row.message + HEADER_BYTES, scratch.levels, BOTH);
    const int64_t at = tiles_at + int64_t(2) * (end - own);
    warp.copy(row.message + at, row.words_end(tile) - own, 2 * int64_t(own));
    row.ends()[tile] = end;
}

// Checks a message's header, of which `available` bytes are there, and makes the tables.
template <class W> ZPP_WARP Status read_header(const W& warp, const Row& row, int64_t available) {
    Scratch* scratch = row.scratch;
    const uint32_t* header = row.header();
    scratch->tiles = 0;  // that may be read
    if (available > row.coding.room) available = row.coding.room;
    if (available < HEADER_BYTES || header[LENGTH] > available) return WRONG_HEADER;
    const int64_t length = header[LENGTH], steps = header[STEPS];
    if (header[SIZE] != uint32_t(row.coding.size) || !steps) return WRONG_HEADER;
    const int64_t tiles = (row.steps + steps - 1) / steps, tiles_at = ENDS_AT + 4 * tiles;
    if (tiles > row.most_tiles()) return WRONG_HEADER;
    if (row.is_stored()) {
        if (length != HEADER_BYTES + row.coding.size) return WRONG_HEADER;
    } else {
        if (header[KIND] != (FORMAT | uint32_t(row.coding.kind))) return WRONG_HEADER;
        if (length < tiles_at || length != tiles_at + int64_t(2) * row.ends()[tiles - 1]) {
            return WRONG_HEADER;
        }
        if (!make_tables(warp, scratch, row.message + HEADER_BYTES)) return WRONG_TABLES;
    }
    scratch->steps = steps;
    scratch->tiles = tiles;
    return SOUND;
}

// Fills what decode_tile looks up with the slots of every `stride`-th symbol.
template <class W>
ZPP_WARP void fill_entries(const W& warp, const Row& row, int first, int stride,
                           uint32_t* entries) {
    for (int i = first; i < BOTH && !row.is_stored(); i += stride) {
        const uint32_t frequency = row.scratch->frequencies[i];
        uint32_t* to = entries + i / SYMBOLS * ONE + row.scratch->starts[i];
        warp.each([&](int lane) {
            for (uint32_t slot = lane; slot < frequency; slot += STATES) {
                to[slot] = uint32_t(i % SYMBOLS) | slot << 8 | (frequency - 1) << 20;
            }
        });
    }
}

// Returns whether what the message has of the tile is right.
template <class W>
ZPP_WARP bool decode_tile(const W& warp, const Row& row, int64_t tile, const uint32_t* entries) {
    using Numbers = typename W::template Lanes<uint32_t>;
    const int64_t byte = row.byte_at(tile), tiles = row.scratch->tiles;
    if (row.is_stored()) {
        warp.copy(row.row + byte, row.message + HEADER_BYTES + byte, row.byte_at(tile + 1) - byte);
        return true;
    }
    const int64_t from = tile ? row.ends()[tile - 1] : 0, to = row.ends()[tile];
    if (to > row.ends()[tiles - 1] || to - from < STATE_WORDS) return false;
    const uint16_t* words = reinterpret_cast<uint16_t*>(row.ends() + tiles) + from;
    const uint16_t *at = words + STATE_WORDS, *end = words + (to - from);
    Numbers states, checks;
    bool is_wrong = false;
    const auto take = [&](const auto& table_in) {  // 0 for a lane whose table is NOTHING
        Numbers symbols;
        warp.each([&](int lane) {
            const uint32_t table = table_in(lane);
            symbols[lane] = 0;
            if (table == NOTHING) return;
            const uint32_t entry = entries[table * ONE + states[lane] % ONE];
            states[lane] = decoded(states[lane], entry);
            symbols[lane] = entry & 255;
        });
        const uint32_t low = warp.vote([&](int lane) { return states[lane] < LOWEST; });
        is_wrong |= popcount(low) > end - at;
        if (is_wrong) return symbols;
        warp.each([&](int lane) {
            if (low >> lane & 1) states[lane] = states[lane] << 16 | at[rank_of(low, lane)];
        });
        at += popcount(low);
        return symbols;
    };
    warp.each([&](int lane) {
        states[lane] = words[lane] | uint32_t(words[STATES + lane]) << 16;
        checks[lane] = 0;
    });
    for (int64_t step = row.step_at(tile); step < row.step_at(tile + 1); ++step) {
        const int64_t index = step * STATES, width = row.width;
        const int64_t left = row.coding.size / width - index;
        Numbers values = take([&](int lane) {
            return lane < left ? row.table_of(index + lane) : NOTHING;
        });
        if (width == 4) {
            Numbers others;
            warp.each([&](int lane) {
                const uint32_t symbol = values[lane];
                others[lane] = bytes_with(symbol, 3);
                values[lane] = (bytes_with(symbol, 1) ^ others[lane]) |
                               (bytes_with(symbol, 2) ^ others[lane]) * 255;
            });
            const bool any = warp.vote([&](int lane) { return others[lane] != 0; });
            for (int shift = 0; any && shift < 32; shift += 8) {
                const Numbers found = take([&](int lane) {
                    return others[lane] >> shift & 1 ? 1 : NOTHING;
                });
                warp.each([&](int lane) { values[lane] |= found[lane] << shift; });
            }
        }
        if (is_wrong) return false;
        warp.each([&](int lane) {
            checks[lane] += check_of(values[lane], index + lane);
            uint8_t* target = row.row + (index + lane) * width;
            if (lane >= left) return;
            if (width == 4) {
                *reinterpret_cast<uint32_t*>(target) = plus_bytes(word_at(target), values[lane]);
            } else {
                *target = uint8_t(values[lane]);
            }
        });
    }
    const uint32_t check = sum(warp, STATES, [&](int64_t lane) { return checks[int(lane)]; });
    const uint32_t sent = words[2 * STATES] | uint32_t(words[2 * STATES + 1]) << 16;
    return at == end && check == sent &&
           !warp.vote([&](int lane) { return states[lane] != LOWEST; });
}

}  // namespace zpp
