// Codes of three and two bits for x86: eight of them in three or two bytes, the first in the lowest bits.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "math.h"

namespace zpp {

// 16 codes 0 ... 7 as bytes -> in each 64-bit half, eight of them in the lowest 24 bits.
static inline __m128i eight_in_24_bits(__m128i codes) {
    const __m128i six = _mm_maddubs_epi16(codes, _mm_set1_epi16(0x0801));  // first + 8 second
    const __m128i twelve = _mm_madd_epi16(six, _mm_set1_epi32(0x00400001));  // first + 64 second
    return _mm_or_si128(twelve, _mm_srli_epi64(twelve, 20));
}

// Writes 32 int8 -4 ... 3, given in two halves, as 12 bytes.
static inline void put_three_bits(__m128i first, __m128i last, uint8_t* codes) {
    const __m128i four = _mm_set1_epi8(4);
    const __m128i low = eight_in_24_bits(_mm_add_epi8(first, four));
    const __m128i high = eight_in_24_bits(_mm_add_epi8(last, four));
    const __m128i front = _mm_setr_epi8(0, 1, 2, 8, 9, 10, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m128i back = _mm_setr_epi8(-1, -1, -1, -1, -1, -1, 0, 1, 2, 8, 9, 10, -1, -1, -1, -1);
    const __m128i both = _mm_or_si128(_mm_shuffle_epi8(low, front), _mm_shuffle_epi8(high, back));
    const int end = _mm_extract_epi32(both, 2);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(codes), both);
    memcpy(codes + 8, &end, 4);
}

// Of 32 codes, eight in the lowest bits of a word, those from 8 i on. Reads no byte beyond the codes.
template <Width W> static inline int eight_codes(const uint8_t* codes, int i) {
    if (W == INT2) {
        uint16_t eight;
        memcpy(&eight, codes + 2 * i, 2);
        return eight;
    }
    uint32_t word;
    memcpy(&word, codes + (i < 3 ? 3 * i : 8), 4);
    return int(i < 3 ? word : word >> 8);
}

}  // namespace zpp
