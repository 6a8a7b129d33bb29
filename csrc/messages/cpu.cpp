// Bytes of messages, rearranged so that an entropy coder makes the most of them: differences from what
// the receiver holds, four to a byte, and codes of three bits, two to a byte. zeropp/quant/rearranged.py
// defines both; its functions call these.

#include <stdint.h>
#include <string.h>

namespace {

constexpr uint64_t LOW_BITS = 0x5555555555555555u;  // of the four symbols in each byte

// 0 for no difference, 1 for one more, 2 for one less, 3 for any other.
inline uint8_t symbol_of(uint8_t difference) {
    const uint8_t above = uint8_t(difference + 1);
    return above == 1 ? 0 : above == 2 ? 1 : above == 0 ? 2 : 3;
}

// Call body(byte, shift) for the symbols 3, byte after byte, from the lowest bits up.
template <class Body> void for_each_other(const uint8_t* symbols, int64_t quarter, const Body& body) {
    for (int64_t first = 0; first < quarter; first += 8) {
        const int64_t count = quarter - first < 8 ? quarter - first : 8;
        uint64_t word = 0;
        memcpy(&word, symbols + first, size_t(count));
        if (!(word & word >> 1 & LOW_BITS)) continue;
        for (int64_t byte = first; byte < first + count; ++byte) {
            for (int shift = 0; shift < 8; shift += 2) {
                if ((symbols[byte] >> shift & 3) == 3) body(byte, shift);
            }
        }
    }
}

}  // namespace

extern "C" {

// row, held: `quarter` * 4 bytes; symbols: `quarter` bytes; others: room for `quarter` * 4 bytes.
// Returns how many others there are.
int64_t zpp_differences(const uint8_t* row, const uint8_t* held, int64_t quarter, uint8_t* symbols,
                        uint8_t* others) {
    for (int64_t i = 0; i < quarter; ++i) {
        uint8_t four = 0;
        for (int plane = 0; plane < 4; ++plane) {
            const int64_t at = plane * quarter + i;
            four = uint8_t(four | symbol_of(uint8_t(row[at] - held[at])) << 2 * plane);
        }
        symbols[i] = four;
    }
    int64_t count = 0;
    for_each_other(symbols, quarter, [&](int64_t byte, int shift) {
        const int64_t at = shift / 2 * quarter + byte;
        others[count++] = uint8_t(row[at] - held[at]);
    });
    return count;
}

// Adds differences to `row`. Returns 0, or -1 and changes nothing if there are not `count` others.
int64_t zpp_add_differences(const uint8_t* symbols, const uint8_t* others, int64_t count,
                            int64_t quarter, uint8_t* row) {
    int64_t marked = 0;
    for_each_other(symbols, quarter, [&](int64_t, int) { ++marked; });
    if (marked != count) return -1;
    for (int plane = 0; plane < 4; ++plane) {
        uint8_t* part = row + plane * quarter;
        for (int64_t i = 0; i < quarter; ++i) {
            const uint8_t symbol = symbols[i] >> 2 * plane & 3;
            part[i] = uint8_t(part[i] + (symbol & 1) - (symbol >> 1));
        }
    }
    int64_t next = 0;
    for_each_other(symbols, quarter, [&](int64_t byte, int shift) {
        uint8_t* target = row + shift / 2 * quarter + byte;
        *target = uint8_t(*target + others[next++]);
    });
    return 0;
}

// Three bytes of eight codes -> four bytes of two codes each.
int64_t zpp_spread_threes(const uint8_t* threes, int64_t count, uint8_t* fours) {
    for (int64_t i = 0; i < count; ++i, threes += 3, fours += 4) {
        const uint32_t word = threes[0] | threes[1] << 8 | uint32_t(threes[2]) << 16;
        for (int pair = 0; pair < 4; ++pair) fours[pair] = word >> 6 * pair & 63;
    }
    return 0;
}

int64_t zpp_join_threes(const uint8_t* fours, int64_t count, uint8_t* threes) {
    for (int64_t i = 0; i < count; ++i, fours += 4, threes += 3) {
        uint32_t word = 0;
        for (int pair = 0; pair < 4; ++pair) word |= uint32_t(fours[pair] & 63) << 6 * pair;
        for (int byte = 0; byte < 3; ++byte) threes[byte] = uint8_t(word >> 8 * byte);
    }
    return 0;
}

}  // extern "C"
