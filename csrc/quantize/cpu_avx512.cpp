// Quantization for x86 with AVX-512 (F, BW, DQ, VL); on other processors this file is empty.

#ifdef __x86_64__

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || \
    !defined(__AVX512VL__)
#error "compile this file with the flags that csrc/flags.py has for it"
#endif

#include "../shared/vector_avx512.h"
#include "cpu_tiles.h"
#include "odd_codes_x86.h"

namespace zpp {
namespace {

struct Avx512Codes : Avx512 {
    static uint32_t most_unsigned(__m256i words) {  // of sixteen 16-bit words
        const __m128i eight =
            _mm_max_epu16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        const __m128i ones = _mm_set1_epi16(-1);
        const __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, ones));
        return 0xFFFFu ^ uint32_t(_mm_extract_epi16(least, 0));
    }

    // Collects the extremes of floats, compared by their bits.
    class FloatExtremes {
        I most_ = _mm512_set1_epi32(INT32_MIN), top_ = _mm512_setzero_si512();

    public:
        void add(const __m512* unit) {
            for (int i = 0; i < 4; ++i) {
                const I words = _mm512_castps_si512(unit[i]);
                most_ = _mm512_max_epi32(most_, words);
                top_ = _mm512_max_epu32(top_, words);
            }
        }

        void end(uint32_t* high, uint32_t* low) const {
            *high = uint32_t(_mm512_reduce_max_epi32(most_));
            *low = _mm512_reduce_max_epu32(top_);
        }
    };

    template <Width W> static void put(const F* unit, uint8_t* codes) {
        if (W == INT3) {
            F halves[4];
            for (int i = 0; i < 4; ++i) halves[i] = add_product(unit[i], all(0.5f), all(-0.5f));
            const I most = _mm512_min_epi8(int8_of(halves), _mm512_set1_epi8(3));  // all >= -4.04
            put_three_bits(_mm512_castsi512_si128(most), _mm512_extracti32x4_epi32(most, 1), codes);
            return put_three_bits(_mm512_extracti32x4_epi32(most, 2),
                                  _mm512_extracti32x4_epi32(most, 3), codes + 12);
        }
        I bytes = int8_of(unit);
        if (W == INT8) return put_at(codes, bytes);
        bytes = _mm512_min_epi8(bytes, _mm512_set1_epi8(7));  // all are >= -8.07 steps
        bytes = _mm512_and_si512(bytes, _mm512_set1_epi8(15));
        const I pairs = _mm512_maddubs_epi16(bytes, _mm512_set1_epi16(0x1001));  // low + 16 high
        put_half_at(codes, _mm512_cvtepi16_epi8(pairs));
    }

    // For each element of a unit, whether it reaches a limit.
    static __mmask64 reached(const F* unit, F limit) {
        __mmask64 all = 0;
        for (int i = 0; i < 4; ++i) {
            all |= __mmask64(_mm512_cmp_ps_mask(unit[i], limit, _CMP_GE_OQ)) << 16 * i;
        }
        return all;
    }

    static void put_two_bits(const F* unit, F distance, uint8_t* codes) {
        const F zero = _mm512_setzero_ps();
        const I one = _mm512_set1_epi8(1);
        I bytes = _mm512_maskz_mov_epi8(reached(unit, _mm512_sub_ps(zero, distance)), one);
        bytes = _mm512_mask_add_epi8(bytes, reached(unit, zero), bytes, one);
        bytes = _mm512_mask_add_epi8(bytes, reached(unit, distance), bytes, one);
        const I twos = _mm512_maddubs_epi16(bytes, _mm512_set1_epi16(0x0401));  // first + 4 second
        const I fours = _mm512_madd_epi16(twos, _mm512_set1_epi32(0x00100001));  // first + 16 second
        put_quarter_at(codes, _mm512_cvtepi32_epi8(fours));
    }

    // What 16 codes of three bits stand for: words `i` and `i` + 1 of 12 bytes.
    static __m512 sixteen_values(const uint8_t* codes, int i) {
        const __m512 values =  // by the lowest 4 bits, of which the highest is the next code's
            _mm512_setr_ps(-7, -5, -3, -1, 1, 3, 5, 7, -7, -5, -3, -1, 1, 3, 5, 7);
        const I shifts =
            _mm512_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21, 0, 3, 6, 9, 12, 15, 18, 21);
        const __m256i first = _mm256_set1_epi32(eight_codes<INT3>(codes, i));
        const __m256i second = _mm256_set1_epi32(eight_codes<INT3>(codes, i + 1));
        const I words = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
        return _mm512_permutexvar_ps(_mm512_srlv_epi32(words, shifts), values);
    }

    template <Width W> static void get(const uint8_t* codes, F* unit) {
        if (W == INT8) return load_int8(codes, unit);
        if (W == INT3) {
            for (int i = 0; i < 4; ++i) unit[i] = sixteen_values(codes + i / 2 * 12, i % 2 * 2);
            return;
        }
        if (W == INT2) {
            const F values = _mm512_set4_ps(3, 1, -1, -3);
            const I shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            for (int i = 0; i < 4; ++i) {
                int sixteen;
                memcpy(&sixteen, codes + 4 * i, 4);
                const I words = _mm512_srlv_epi32(_mm512_set1_epi32(sixteen), shifts);
                unit[i] = _mm512_permutevar_ps(values, words);  // by the lowest 2 bits
            }
            return;
        }
        const __m128i value = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
        const __m128i nibble = _mm_set1_epi8(15);
        for (int i = 0; i < 4; i += 2) {
            const __m128i pairs = quarter_at(codes + 8 * i);
            const __m128i low = _mm_shuffle_epi8(value, _mm_and_si128(pairs, nibble));
            const __m128i high =
                _mm_shuffle_epi8(value, _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble));
            unit[i] = floats(_mm_unpacklo_epi8(low, high));
            unit[i + 1] = floats(_mm_unpackhi_epi8(low, high));
        }
    }

    // Of each two lanes that are swapped: their sum in the first one, their difference in the other
    // one, whose sign is -1. A product with a sign is exact, so that this rounds as an addition does.
    static F butterfly(F x, F swapped, F signs) { return _mm512_fmadd_ps(x, signs, swapped); }

    static F signs(__mmask16 second) {
        return _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), second, _mm512_set1_ps(-1.0f));
    }

    static void rotate(F* unit) {
        for (int i = 0; i < 4; i += 2) {
            const F first = unit[i], second = unit[i + 1];
            unit[i] = _mm512_add_ps(first, second);
            unit[i + 1] = _mm512_sub_ps(first, second);
        }
        const F by8 = signs(0xFF00), by4 = signs(0xF0F0), by2 = signs(0xCCCC), by1 = signs(0xAAAA);
        for (int i = 0; i < 4; ++i) {
            unit[i] = butterfly(unit[i], _mm512_shuffle_f32x4(unit[i], unit[i], 0x4E), by8);
            unit[i] = butterfly(unit[i], _mm512_shuffle_f32x4(unit[i], unit[i], 0xB1), by4);
            unit[i] = butterfly(unit[i], _mm512_permute_ps(unit[i], 0x4E), by2);
            unit[i] = butterfly(unit[i], _mm512_permute_ps(unit[i], 0xB1), by1);
        }
    }

    static void extremes(const uint16_t* from, int64_t size, uint32_t* high, uint32_t* low) {
        I most = _mm512_set1_epi16(INT16_MIN), top = _mm512_setzero_si512();
        for (int64_t i = 0; i < size; i += 32) {
            const I words = at(from + i);
            most = _mm512_max_epi16(most, words);
            top = _mm512_max_epu16(top, words);
        }
        const __m256i most16 = _mm256_max_epi16(_mm512_castsi512_si256(most),
                                                _mm512_extracti64x4_epi64(most, 1));
        const __m256i sign = _mm256_set1_epi16(INT16_MIN);
        *high = most_unsigned(_mm256_xor_si256(most16, sign)) ^ 0x8000u;
        *low = most_unsigned(_mm256_max_epu16(_mm512_castsi512_si256(top),
                                              _mm512_extracti64x4_epi64(top, 1)));
    }
};

}  // namespace

const QuantizeKernels AVX512_QUANTIZE = quantize_kernels<Avx512Codes>();

}  // namespace zpp

#endif
