// rANS (Duda 2013, arXiv:1311.2540) with 32 interleaved states: messages that host and device code.
//
//     message = [ length in bytes | format | steps of a tile | bytes of the row ]     uint32, then
//               [ how often symbols occur: 2 tables of 256, roughly, a byte each ]
//               [ where each tile ends, in words from the first tile on: uint32 ]
//               [ tiles of uint16 words ]
//     tile    = [ low halves of 32 states | high halves | checksum of the values
//               | words in the order they are read in ]
//
// A step of a tile is a symbol for each state. BYTES: a symbol is a byte; those of no codes are of
// the second table. DIFFERENCES from what the receiver holds: a symbol is four bytes, two bits
// each: 0 no difference, 1 one more, 2 one less, 3 a difference that follows, by the second table;
// those of all first bytes of a step come first. A message that would not shrink is STORED: its
// header, and the row.
#pragma once

#include "../shared/numbers.h"

#ifdef __CUDACC__
#define ZPP_ROW __host__ __device__ __forceinline__
#else
#define ZPP_ROW inline
#endif

namespace zpp {

constexpr int STATES = 32, SYMBOLS = 256, BOTH = 2 * SYMBOLS;
constexpr int PRECISION = 12;  // bits of a probability
constexpr uint32_t ONE = 1u << PRECISION, NOTHING = ~0u;
constexpr uint32_t LOWEST = 1u << 15;  // a state is from here on, and less than 2^31
constexpr int STATE_WORDS = 2 * STATES + 2;  // with the checksum
constexpr int64_t MOST_TILES = 4096, TILE_BYTES = 8448;  // coded; 1.6% are states and the like
constexpr uint32_t FORMAT = 0x5A310000u;

enum Kind { BYTES, DIFFERENCES, STORED };
enum Header { LENGTH, KIND, STEPS, SIZE, HEADER };
constexpr int64_t HEADER_BYTES = 4 * HEADER, ENDS_AT = HEADER_BYTES + BOTH;
enum Status { SOUND, WRONG_HEADER, WRONG_TABLES, WRONG_TILE };

// What zeropp/quant/entropy_coder.py passes: `rows` rows of `size` bytes, those from `first` to `end`
// codes; messages have room for `room` bytes; strides are in bytes too.
struct Coding {
    int64_t rows, size, first, end, kind, room;
    int64_t row_stride, held_stride, coded_stride, scratch_stride;
};

struct Code {  // of a symbol, for the encoder
    uint32_t reciprocal, packed;  // start and more: 13 bits, ONE - frequency: 12, shift: 4
};

// Memory for a row; the words of its tiles follow.
struct Scratch {
    uint32_t starts[BOTH], frequencies[BOTH], words[MOST_TILES];  // words of each tile
    int64_t steps, tiles;  // steps of a tile
    uint8_t levels[BOTH];
};
static_assert(sizeof(Scratch) <= 24 << 10, "SCRATCH in zeropp/quant/entropy_coder.py");

struct Row {
    Coding coding;
    uint8_t* row;
    const uint8_t* held;
    uint8_t* message;
    uint32_t* counts;
    Scratch* scratch;
    int64_t width, steps;  // bytes of a symbol; steps of all tiles

    // `scratch`: counts of all rows, then what else each needs.
    ZPP_ROW Row(const Coding& coding, int64_t index, uint8_t* rows, const uint8_t* held,
                uint8_t* messages, uint8_t* scratch)
        : coding(coding), row(rows + index * coding.row_stride),
          held(held + index * coding.held_stride), message(messages + index * coding.coded_stride),
          counts(reinterpret_cast<uint32_t*>(scratch) + index * BOTH),
          scratch(reinterpret_cast<Scratch*>(scratch + coding.rows * BOTH * 4 +
                                             index * coding.scratch_stride)),
          width(coding.kind == DIFFERENCES ? 4 : 1),
          steps((coding.size / width + STATES - 1) / STATES) {}
    ZPP_ROW uint32_t* header() const { return reinterpret_cast<uint32_t*>(message); }
    ZPP_ROW uint32_t* ends() const { return header() + ENDS_AT / 4; }
    ZPP_ROW bool is_stored() const { return header()[KIND] == (FORMAT | STORED); }
    ZPP_ROW int64_t step_at(int64_t tile) const {
        return tile * scratch->steps < steps ? tile * scratch->steps : steps;
    }
    ZPP_ROW int64_t byte_at(int64_t tile) const {
        const int64_t byte = step_at(tile) * STATES * width;
        return byte < coding.size ? byte : coding.size;
    }
    // The end of the memory for a tile's words: of a symbol one, or five with four differences.
    ZPP_ROW uint16_t* words_end(int64_t tile) const {
        const int64_t words = scratch->steps * STATES * (width + width / 4) + STATE_WORDS;
        return reinterpret_cast<uint16_t*>(scratch + 1) + (tile + 1) * words;
    }
    ZPP_ROW uint32_t table_of(int64_t symbol) const {
        return width == 1 && (symbol < coding.first || symbol >= coding.end);
    }
    ZPP_ROW int64_t most_tiles() const {  // a symbol takes up to 12 bits, a row twice its bytes
        const int64_t tiles = coding.size / (TILE_BYTES / 2) + 1;
        return tiles < MOST_TILES ? tiles : MOST_TILES;
    }
    // Cut the row into tiles that take so many bytes in all.
    ZPP_ROW void plan(int64_t bytes) const {
        const int64_t tiles = bytes / TILE_BYTES, most = most_tiles();
        const int64_t count = tiles < 1 ? 1 : tiles < most ? tiles : most;
        scratch->steps = (steps + count - 1) / count;
        scratch->tiles = (steps + scratch->steps - 1) / scratch->steps;
    }
};

ZPP_HD int floor_log2(uint32_t value) {
    int log = 0;
    for (; value > 1; value >>= 1) ++log;
    return log;
}

ZPP_HD int popcount(uint32_t bits) {
#ifdef __CUDA_ARCH__
    return __popc(bits);
#else
    return __builtin_popcount(bits);
#endif
}

// How many lanes before this one have a vote.
ZPP_HD int rank_of(uint32_t votes, int lane) { return popcount(votes & ((1u << lane) - 1)); }

// A count's first four bits, in a byte; and what is left of the count.
ZPP_HD uint8_t level_of(uint32_t count) {
    const int log = floor_log2(count);
    return uint8_t(count ? 8 * log + (count << 3 >> log) % 8 + 1 : 0);
}
ZPP_HD uint32_t count_of(uint8_t level) {
    return level ? uint32_t(uint64_t(8 + (level - 1) % 8) << (level - 1) / 8 >> 3) : 0;
}

// About what symbols of a frequency take.
ZPP_HD uint32_t bytes_of(uint32_t count, uint32_t frequency) {
    const int log = floor_log2(frequency);
    const uint32_t eighths = 8 * (PRECISION - log + 1) - (frequency << 3 >> log);  // of a bit
    return uint32_t(uint64_t(count) * eighths / 64);
}

ZPP_HD Code code_of(uint32_t start, uint32_t frequency) {
    if (frequency < 2) return Code{~0u, (start + ONE - 1) | (ONE - 1) << 13};
    const int shift = floor_log2(frequency - 1);
    const uint64_t scaled = (uint64_t(1) << (shift + 32)) + frequency - 1;
    return Code{uint32_t(scaled / frequency), start | (ONE - frequency) << 13 | shift << 25};
}

// A state from which on a word is written before the symbol is coded.
ZPP_HD uint32_t limit_of(const Code& code) { return (ONE - (code.packed >> 13) % ONE) << 19; }

ZPP_HD uint32_t encoded(uint32_t state, const Code& code) {
    const uint32_t high = uint32_t(uint64_t(state) * code.reciprocal >> 32);
    const uint32_t quotient = high >> (code.packed >> 25);  // state / frequency
    return state + (code.packed & 8191) + quotient * ((code.packed >> 13) % ONE);
}

// The lowest byte of an entry is the symbol, then come the slot's place among its own, and the
// symbol's frequency less one.
ZPP_HD uint32_t decoded(uint32_t state, uint32_t entry) {
    return ((entry >> 20) + 1) * (state >> PRECISION) + (entry >> 8) % ONE;
}

// What a value adds to the checksum, in which no single change is lost.
ZPP_HD uint32_t check_of(uint32_t value, int64_t index) {
    return value * (2 * uint32_t(index) + 1);
}

ZPP_HD uint32_t word_at(const uint8_t* bytes) { return *reinterpret_cast<const uint32_t*>(bytes); }

ZPP_HD uint32_t plus_bytes(uint32_t a, uint32_t b) {
    return ((a & 0x7F7F7F7Fu) + (b & 0x7F7F7F7Fu)) ^ ((a ^ b) & 0x80808080u);
}

ZPP_HD uint32_t minus_bytes(uint32_t a, uint32_t b) {
    return ((a | 0x80808080u) - (b & 0x7F7F7F7Fu)) ^ ((a ^ ~b) & 0x80808080u);
}

// Four differences -> the symbol.
ZPP_HD uint32_t symbol_of(uint32_t differences) {
    const uint32_t above = plus_bytes(differences, 0x01010101u);  // 1 in a byte: none
    const uint32_t large = (((above & 0x7C7C7C7Cu) + 0x7C7C7C7Cu) | above) >> 7;
    const uint32_t other = large | (above & above >> 1);  // the lowest bit of a byte, as below
    const uint32_t more = (above >> 1 | other) & 0x01010101u;
    const uint32_t less = (~(above | above >> 1) | other) & 0x01010101u;
    const uint32_t pairs = more | less << 1;
    return (pairs | pairs >> 6 | pairs >> 12 | pairs >> 18) & 255;
}

// 1 in each byte whose symbol has a bit, or for bits of 3, both: its difference follows.
ZPP_HD uint32_t bytes_with(uint32_t symbol, uint32_t bits) {
    const uint32_t pairs = symbol | symbol << 6 | symbol << 12 | symbol << 18;
    return (bits & 1 ? pairs : ~0u) & (bits & 2 ? pairs >> 1 : ~0u) & 0x01010101u;
}

}  // namespace zpp
