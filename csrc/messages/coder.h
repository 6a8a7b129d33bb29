// How rows are coded and decoded, on host and device. W is a warp: of a GPU, whose threads have a lane
// each, or of a CPU, which has all 32. `W::Lanes<T>` is a T for each lane; `each` calls a function
// with each lane, `vote` collects a bit of each; `scan` returns the sums over the lanes before, from
// a total on, to which it adds all.
#pragma once

#include "math.h"

#ifdef __CUDACC__
#define ZPP_WARP __device__ __forceinline__
#define ZPP_ROW __host__ __device__ __forceinline__
#define ZPP_UNROLL _Pragma("unroll")
#else
#define ZPP_WARP inline
#define ZPP_ROW inline
#define ZPP_UNROLL
#endif

namespace zpp {

constexpr int AHEAD = 8;  // steps of a tile that are read before the first of them is coded

template <class W, class T> using Lanes = typename W::template Lanes<T>;

// Memory for a row; its tiles follow, each where its bytes are in the row.
struct Scratch {
    uint32_t starts[TABLES * SYMBOLS], frequencies[TABLES * SYMBOLS];
    uint32_t words[MOST_TILES];  // of each tile
    int64_t steps, tiles;        // steps of a tile
    uint8_t levels[TABLES * SYMBOLS];
};
static_assert(sizeof(Scratch) <= 24 << 10, "SCRATCH in zeropp/quant/entropy_coder.py");

struct Row {
    Coding coding;
    uint8_t* row;
    const uint8_t* held;
    uint8_t* message;
    uint32_t* counts;
    Scratch* scratch;
    int64_t codes, symbols, steps;  // `codes`: symbols of codes

    // `scratch`: counts of all rows, then what else each needs.
    ZPP_ROW Row(const Coding& coding, int64_t index, uint8_t* rows, const uint8_t* held,
                 uint8_t* messages, uint8_t* scratch)
        : coding(coding), row(rows + index * coding.row_stride),
          held(held + index * coding.held_stride), message(messages + index * coding.coded_stride),
          counts(reinterpret_cast<uint32_t*>(scratch) + index * TABLES * SYMBOLS),
          scratch(reinterpret_cast<Scratch*>(scratch + coding.rows * TABLES * SYMBOLS * 4 +
                                             index * coding.scratch_stride)) {
        const int64_t bytes = coding.end - coding.first;
        codes = coding.kind == THREES ? bytes / 3 * 4 : bytes;
        symbols = coding.kind == DIFFERENCES ? coding.size / 4 : coding.size - bytes + codes;
        steps = (symbols + STATES - 1) / STATES;
    }
    ZPP_ROW uint32_t* header() const { return reinterpret_cast<uint32_t*>(message); }
    ZPP_ROW bool is_stored() const { return header()[KIND] == (FORMAT | STORED); }
    ZPP_ROW uint32_t* ends() const { return reinterpret_cast<uint32_t*>(message + ENDS_AT); }
    ZPP_ROW int64_t tiles_at() const { return ENDS_AT + 4 * scratch->tiles; }
    ZPP_ROW uint16_t* tiles() const { return reinterpret_cast<uint16_t*>(scratch + 1); }
    ZPP_ROW uint32_t table_of(int64_t symbol) const {
        return uint64_t(symbol - coding.first) >= uint64_t(codes);
    }
    ZPP_ROW bool is_three(int64_t symbol) const {
        return coding.kind == THREES && !table_of(symbol);
    }
    ZPP_ROW int64_t byte_of(int64_t symbol) const {  // where it begins, or its three bytes do
        if (symbol >= symbols) return coding.size;
        if (coding.kind == DIFFERENCES) return symbol * 4;
        const int64_t code = symbol - coding.first;
        if (coding.kind == BYTES || code < 0) return symbol;
        return code < codes ? coding.first + code / 4 * 3 : coding.end + code - codes;
    }
    ZPP_ROW int64_t tile_at(int64_t tile) const { return byte_of(tile * scratch->steps * STATES); }
    ZPP_ROW int64_t end_of(int64_t tile) const {  // its steps
        return (tile + 1) * scratch->steps < steps ? (tile + 1) * scratch->steps : steps;
    }
    // A symbol takes up to 12 bits, so that a row takes at most twice its bytes.
    ZPP_ROW int64_t most_tiles() const {
        const int64_t tiles = coding.size / (TILE_BYTES / 2) + 1;
        return tiles < MOST_TILES ? tiles : MOST_TILES;
    }
    // Cut the row into tiles that take so many bytes in all.
    ZPP_ROW void plan(int64_t bytes) const {
        const int64_t tiles = bytes / TILE_BYTES, most = most_tiles();
        const int64_t count = tiles < 1 ? 1 : tiles < most ? tiles : most;
        scratch->steps = steps ? (steps + count - 1) / count : 1;
        scratch->tiles = (steps + scratch->steps - 1) / scratch->steps;
    }
};

constexpr uint32_t NOTHING = ~0u;

struct Symbol {
    uint32_t at;  // among those of both tables; NOTHING after the row's end
    uint32_t others, value;  // a difference in each byte, or what the symbol is
};

ZPP_WARP Symbol read_symbol(const Row& row, int64_t index) {
    if (index >= row.symbols) return Symbol{NOTHING, 0, 0};
    const uint8_t* bytes = row.row + row.byte_of(index);
    if (row.coding.kind == DIFFERENCES) {
        const uint32_t differences = minus_bytes(word_at(bytes), word_at(row.held + 4 * index));
        const uint32_t symbol = symbol_of(differences);
        return Symbol{symbol, others_of(symbol), differences};
    }
    if (!row.is_three(index)) return Symbol{SYMBOLS * row.table_of(index) + *bytes, 0, *bytes};
    const uint32_t bit = uint32_t(index - row.coding.first) % 4 * 6;
    const uint32_t next = bit % 18 ? bytes[bit / 8 + 1] : 0;
    const uint32_t two = (bytes[bit / 8] | next << 8) >> bit % 8 & 63;
    return Symbol{two, 0, two};
}

// Write a symbol's value; `next`: that of the symbol after it.
ZPP_WARP void write_value(const Row& row, int64_t index, uint32_t value, uint32_t next) {
    uint8_t* bytes = row.row + row.byte_of(index);
    const int pair = int((index - row.coding.first) % 4);
    if (row.coding.kind == DIFFERENCES) {
        *reinterpret_cast<uint32_t*>(bytes) = plus_bytes(word_at(bytes), value);
    } else if (!row.is_three(index)) {
        *bytes = uint8_t(value);
    } else if (pair < 3) {
        bytes[pair] = uint8_t((value & 63) >> 2 * pair | next << (6 - 2 * pair));
    }
}

template <class W, class F> ZPP_WARP uint32_t sum(const W& warp, int64_t count, const F& term) {
    Lanes<W, uint32_t> parts;
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

// Levels -> starts and frequencies of symbols, which are at least 1 and ONE in all. Returns false for
// levels of more symbols than a row can have.
template <class W> ZPP_WARP bool make_tables(const W& warp, Scratch* scratch, const uint8_t* levels) {
    uint32_t wrong = 0;
    for (int at = 0; at < TABLES * SYMBOLS; at += SYMBOLS, levels += SYMBOLS) {
        const uint32_t least = sum(warp, SYMBOLS, [&](int64_t i) { return count_of(levels[i]); });
        const auto count = [&](int64_t i) {
            const uint32_t of = count_of(levels[i]), most = least / LEAST + 1;
            return !of || of > most ? of : most;
        };
        const uint64_t all = sum(warp, SYMBOLS, count);
        uint32_t total = 0;
        for (int first = 0; first < SYMBOLS; first += STATES) {
            const Lanes<W, uint32_t> before =
                warp.scan([&](int lane) { return count(first + lane); }, &total);
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
        for (int i = lane; i < TABLES * SYMBOLS; i += STATES) {
            scratch->levels[i] = level_of(row.counts[i]);
        }
    });
    make_tables(warp, scratch, scratch->levels);
    const uint32_t bytes = sum(warp, TABLES * SYMBOLS, [&](int64_t i) {
        return row.counts[i] ? bytes_of(row.counts[i], scratch->frequencies[i]) : 0;
    });
    row.plan(bytes);
}

// States of a tile, and where its words go, from the last to the first.
template <class W> struct Encoder {
    const W& warp;
    const Code* codes;
    uint16_t* at;
    const uint16_t* lowest;
    Lanes<W, uint32_t> states;

    // Codes symbol_in(lane), if it is not NOTHING. Returns whether there is room.
    template <class F> ZPP_WARP bool put(const F& symbol_in) {
        const uint32_t full = warp.vote([&](int lane) {
            const uint32_t symbol = symbol_in(lane);
            return symbol != NOTHING && states[lane] >= limit_of(codes[symbol]);
        });
        at -= popcount(full);
        if (at <= lowest) return false;
        warp.each([&](int lane) {
            const bool is_full = full >> lane & 1;
            if (is_full) at[rank_of(full, lane)] = uint16_t(states[lane]);
            states[lane] >>= is_full ? 16 : 0;
            const uint32_t symbol = symbol_in(lane);
            if (symbol != NOTHING) states[lane] = encoded(states[lane], codes[symbol]);
        });
        return true;
    }
};

// Returns how many words the tile has: those of the row's bytes if it would not shrink.
template <class W>
ZPP_WARP uint32_t encode_tile(const W& warp, const Row& row, int64_t tile, const Code* codes) {
    const int64_t first = tile * row.scratch->steps;
    const uint16_t* from = row.tiles() + row.tile_at(tile) / 2;
    uint16_t* to = row.tiles() + row.tile_at(tile + 1) / 2;
    Encoder<W> encoder{warp, codes, to, from + STATE_WORDS, {}};
    Lanes<W, uint32_t> checks;
    warp.each([&](int lane) {
        encoder.states[lane] = LOWEST;
        checks[lane] = 0;
    });
    for (int64_t step = row.end_of(tile) - 1; step >= first; step -= AHEAD) {
        Lanes<W, Symbol> ahead[AHEAD];
        ZPP_UNROLL for (int i = 0; i < AHEAD; ++i) {
            const int64_t index = step - i < first ? row.symbols : (step - i) * STATES;
            warp.each([&](int lane) {
                ahead[i][lane] = read_symbol(row, index + lane);
                checks[lane] += check_of(ahead[i][lane].value, index + lane);
            });
        }
        ZPP_UNROLL for (int i = 0; i < AHEAD; ++i) {
            const Lanes<W, Symbol>& symbols = ahead[i];
            const bool any = warp.vote([&](int lane) { return symbols[lane].others != 0; });
            for (int shift = 24; any && shift >= 0; shift -= 8) {
                const auto other = [&](int lane) {
                    const uint32_t symbol = SYMBOLS + (symbols[lane].value >> shift & 255);
                    return symbols[lane].others >> shift & 1 ? symbol : NOTHING;
                };
                if (!encoder.put(other)) return uint32_t(to - from);
            }
            if (!encoder.put([&](int lane) { return symbols[lane].at; })) return uint32_t(to - from);
        }
    }
    encoder.at -= STATE_WORDS;
    warp.each([&](int lane) {
        encoder.at[lane] = uint16_t(encoder.states[lane]);
        encoder.at[STATES + lane] = uint16_t(encoder.states[lane] >> 16);
    });
    const uint32_t check = sum(warp, STATES, [&](int64_t lane) { return checks[int(lane)]; });
    encoder.at[2 * STATES] = uint16_t(check);
    encoder.at[2 * STATES + 1] = uint16_t(check >> 16);
    return uint32_t(to - encoder.at);
}

// Copies a tile to where it belongs in the message, the first also header and tables.
template <class W>
ZPP_WARP void join_tile(const W& warp, const Row& row, int64_t tile, int64_t* length) {
    const Scratch& scratch = *row.scratch;
    const auto words = [&](int64_t i) { return scratch.words[i]; };
    const int64_t before = sum(warp, tile, words), stored = HEADER_BYTES + row.coding.size;
    const int64_t coded = row.tiles_at() + 2 * int64_t(sum(warp, scratch.tiles, words));
    const bool is_stored = coded >= stored;
    if (!tile) {
        if (!is_stored) warp.copy(row.message + HEADER_BYTES, scratch.levels, TABLES * SYMBOLS);
        *length = is_stored ? stored : coded;  // by every lane
        row.header()[LENGTH] = uint32_t(*length);
        row.header()[KIND] = FORMAT | uint32_t(is_stored ? STORED : row.coding.kind);
        row.header()[STEPS] = uint32_t(scratch.steps);
        row.header()[SIZE] = uint32_t(row.coding.size);
    }
    if (tile >= scratch.tiles) return;
    const int64_t from = row.tile_at(tile), to = row.tile_at(tile + 1);
    const int64_t size = 2 * int64_t(scratch.words[tile]), at = row.tiles_at() + 2 * before;
    const void* source = reinterpret_cast<uint8_t*>(row.tiles()) + to - size;
    if (is_stored) {
        warp.copy(row.message + HEADER_BYTES + from, row.row + from, to - from);
    } else {
        warp.copy(row.message + at, size == to - from ? row.row + from : source, size);
        row.ends()[tile] = uint32_t(before + size / 2);
    }
}

// Checks a message's header, of which `available` bytes are there, and makes the tables.
template <class W> ZPP_WARP Status read_header(const W& warp, const Row& row, int64_t available) {
    Scratch* scratch = row.scratch;
    const uint32_t* header = row.header();
    scratch->tiles = 0;  // that may be read
    if (available > row.coding.room) available = row.coding.room;
    if (available < HEADER_BYTES || header[LENGTH] > available) return WRONG_HEADER;
    const int64_t length = header[LENGTH], steps = header[STEPS];
    if (header[SIZE] != uint32_t(row.coding.size)) return WRONG_HEADER;
    if (row.is_stored()) {
        if (length != HEADER_BYTES + row.coding.size) return WRONG_HEADER;
        row.plan(row.coding.size);
        return SOUND;
    }
    if (header[KIND] != (FORMAT | uint32_t(row.coding.kind)) || !steps) return WRONG_HEADER;
    const int64_t tiles = (row.steps + steps - 1) / steps, tiles_at = ENDS_AT + 4 * tiles;
    if (!tiles || tiles > row.most_tiles() || length < tiles_at) return WRONG_HEADER;
    if (length != tiles_at + 2 * int64_t(row.ends()[tiles - 1])) return WRONG_HEADER;
    if (!make_tables(warp, scratch, row.message + HEADER_BYTES)) return WRONG_TABLES;
    scratch->steps = steps;
    scratch->tiles = tiles;
    return SOUND;
}

// Fills what decode_tile looks up with the slots of every `stride`-th symbol.
template <class W>
ZPP_WARP void fill_entries(const W& warp, const Row& row, int first, int stride, uint32_t* entries) {
    if (row.is_stored()) return;
    for (int i = first; i < TABLES * SYMBOLS; i += stride) {
        const uint32_t frequency = row.scratch->frequencies[i];
        uint32_t* to = entries + i / SYMBOLS * ONE + row.scratch->starts[i];
        warp.each([&](int lane) {
            for (uint32_t slot = lane; slot < frequency; slot += STATES) {
                to[slot] = entry_of(i % SYMBOLS, slot, frequency);
            }
        });
    }
}

// States of a tile, and the words that are not yet read.
template <class W> struct Decoder {
    const W& warp;
    const uint32_t* entries;
    const uint16_t *at, *end;
    bool is_wrong;
    Lanes<W, uint32_t> states;

    // Returns the symbols by table_in(lane); 0 where that is NOTHING.
    template <class F> ZPP_WARP Lanes<W, uint32_t> take(const F& table_in) {
        Lanes<W, uint32_t> symbols;
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
    }
};

// Returns whether what the message has of the tile is right.
template <class W>
ZPP_WARP bool decode_tile(const W& warp, const Row& row, int64_t tile, const uint32_t* entries) {
    const Scratch& scratch = *row.scratch;
    const int64_t at = row.tile_at(tile), size = row.tile_at(tile + 1) - at;
    if (row.is_stored()) {
        warp.copy(row.row + at, row.message + HEADER_BYTES + at, size);
        return true;
    }
    const uint32_t from = tile ? row.ends()[tile - 1] : 0, to = row.ends()[tile];
    const uint16_t* words = reinterpret_cast<uint16_t*>(row.message + row.tiles_at()) + from;
    if (from > to || to > row.ends()[scratch.tiles - 1]) return false;
    if (int64_t(2) * (to - from) == size) {
        warp.copy(row.row + at, words, size);
        return true;
    }
    if (to - from < STATE_WORDS) return false;
    Decoder<W> decoder{warp, entries, words + STATE_WORDS, words + (to - from), false, {}};
    Lanes<W, uint32_t> checks;
    warp.each([&](int lane) {
        decoder.states[lane] = words[lane] | uint32_t(words[STATES + lane]) << 16;
        checks[lane] = 0;
    });
    const bool differs = row.coding.kind == DIFFERENCES;
    for (int64_t step = tile * scratch.steps; step < row.end_of(tile); ++step) {
        const int64_t index = step * STATES;
        const Lanes<W, uint32_t> symbols = decoder.take([&](int lane) {
            return index + lane < row.symbols ? row.table_of(index + lane) : NOTHING;
        });
        Lanes<W, uint32_t> others, values;
        warp.each([&](int lane) {
            others[lane] = differs ? others_of(symbols[lane]) : 0;
            values[lane] = differs ? differences_of(symbols[lane]) : symbols[lane];
        });
        const bool any = warp.vote([&](int lane) { return others[lane] != 0; });
        for (int shift = 0; any && shift < 32; shift += 8) {
            const Lanes<W, uint32_t> found = decoder.take([&](int lane) {
                return others[lane] >> shift & 1 ? 1 : NOTHING;
            });
            warp.each([&](int lane) { values[lane] |= found[lane] << shift; });
        }
        if (decoder.is_wrong) return false;
        const Lanes<W, uint32_t> next = warp.next(values);
        warp.each([&](int lane) {
            checks[lane] += check_of(values[lane], index + lane);
            if (index + lane < row.symbols) write_value(row, index + lane, values[lane], next[lane]);
        });
    }
    const uint32_t wrong = warp.vote([&](int lane) { return decoder.states[lane] != LOWEST; });
    const uint32_t check = sum(warp, STATES, [&](int64_t lane) { return checks[int(lane)]; });
    return decoder.at == decoder.end && !wrong &&
           check == (words[2 * STATES] | uint32_t(words[2 * STATES + 1]) << 16);
}

}  // namespace zpp
