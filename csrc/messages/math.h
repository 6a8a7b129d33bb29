// rANS (Duda 2013, arXiv:1311.2540) with 32 interleaved states: format and arithmetic of messages that
// host and device code.
//
//     message = [ length in bytes | format | steps of a tile | bytes of the row ]     uint32, then
//               [ how often symbols occur: 2 tables of 256, roughly, a byte each ]
//               [ where each tile ends, in words from the first tile on: uint32 ]
//               [ tiles of uint16 words ]
//     tile    = [ low halves of 32 states | high halves | checksum of the values, its low half first
//               | words in the order they are read in ]
//
// A step of a tile is a symbol for each state. DIFFERENCES from what the receiver holds: a symbol is
// four bytes, two bits each: 0 no difference, 1 one more, 2 one less, 3 a difference that follows, by
// the second table; those of all first bytes of a step come first. BYTES: a symbol is a byte. THREES:
// a byte too, but three bytes of eight codes are four symbols of two codes. Bytes that are no codes,
// such as scales, are symbols of the second table.
//
// A tile that would not shrink is the bytes of the row instead. A message that would not is STORED:
// its header, and the row.
#pragma once

#include "../shared/numbers.h"

namespace zpp {

constexpr int STATES = 32, SYMBOLS = 256, TABLES = 2;
constexpr int PRECISION = 12;  // bits of a probability
constexpr uint32_t ONE = 1u << PRECISION, LEAST = ONE - SYMBOLS;
constexpr uint32_t LOWEST = 1u << 15;  // a state is from here on, and less than 2^31
constexpr int STATE_WORDS = 2 * STATES + 2;  // with the checksum
constexpr int64_t MOST_TILES = 4096, TILE_BYTES = 8448;  // coded; 1.6% are states, checksum and end
constexpr uint32_t FORMAT = 0x5A310000u;

enum Kind { BYTES, THREES, DIFFERENCES, STORED };
enum Header { LENGTH, KIND, STEPS, SIZE, HEADER };
constexpr int64_t HEADER_BYTES = 4 * HEADER, ENDS_AT = HEADER_BYTES + TABLES * SYMBOLS;
enum Status { SOUND, WRONG_HEADER, WRONG_TABLES, WRONG_TILE };

// What zeropp/quant/entropy_coder.py passes: `rows` rows of `size` bytes, of which those from `first`
// to `end` are codes; messages have room for `room` bytes; strides are in bytes too.
struct Coding {
    int64_t rows, size, first, end, kind, room;
    int64_t row_stride, held_stride, coded_stride, scratch_stride;
};

struct Code {  // of a symbol, for the encoder
    uint32_t reciprocal, packed;  // start and more: 13 bits, ONE - frequency: 12, shift: 4
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

// A count with its first four bits, in a byte; and what is left of it.
ZPP_HD uint8_t level_of(uint32_t count) {
    const int log = count ? floor_log2(count) : 0;
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
ZPP_HD uint32_t limit_of(const Code& code) { return (ONE - (code.packed >> 13 & (ONE - 1))) << 19; }

ZPP_HD uint32_t encoded(uint32_t state, const Code& code) {
    const uint32_t high = uint32_t(uint64_t(state) * code.reciprocal >> 32);
    const uint32_t quotient = high >> (code.packed >> 25);  // state / frequency
    return state + (code.packed & 8191) + quotient * (code.packed >> 13 & (ONE - 1));
}

// What a value adds to the checksum, in which no single change is lost.
ZPP_HD uint32_t check_of(uint32_t value, int64_t index) {
    return value * (2 * uint32_t(index) + 1);
}

// What a decoder looks up: a symbol, the slot's place among its own, its frequency.
ZPP_HD uint32_t entry_of(uint32_t symbol, uint32_t place, uint32_t frequency) {
    return symbol | place << 8 | (frequency - 1) << 20;
}

ZPP_HD uint32_t decoded(uint32_t state, uint32_t entry) {
    return ((entry >> 20) + 1) * (state >> PRECISION) + (entry >> 8 & (ONE - 1));
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

// The symbol's first bits in the lowest of four bytes, and its second ones above.
ZPP_HD uint32_t pairs_of(uint32_t symbol) {
    return symbol | symbol << 6 | symbol << 12 | symbol << 18;
}

// 1 in each byte whose difference follows.
ZPP_HD uint32_t others_of(uint32_t symbol) {
    return pairs_of(symbol) & pairs_of(symbol) >> 1 & 0x01010101u;
}

// The other differences.
ZPP_HD uint32_t differences_of(uint32_t symbol) {
    const uint32_t more = pairs_of(symbol) & 0x01010101u;
    const uint32_t less = pairs_of(symbol) >> 1 & 0x01010101u;
    return (more & ~less) | (less & ~more) * 255;
}

}  // namespace zpp
