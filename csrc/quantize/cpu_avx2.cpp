// Quantization for x86 with AVX2, FMA and F16C; on other processors this file is empty.

#ifdef __x86_64__

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "compile this file with the flags that csrc/flags.py has for it"
#endif

#include "../shared/vector_avx2.h"
#include "cpu_tiles.h"
#include "odd_codes_x86.h"

namespace zpp {
namespace {

struct Avx2Codes : Avx2 {
    static uint32_t most_unsigned(__m128i words) {  // of eight 16-bit words
        const __m128i ones = _mm_set1_epi16(-1);
        const __m128i least = _mm_minpos_epu16(_mm_xor_si128(words, ones));
        return 0xFFFFu ^ uint32_t(_mm_extract_epi16(least, 0));
    }

    // Collects the extremes of floats, compared by their bits, in two independent chains.
    class FloatExtremes {
        I most_[2], top_[2];

    public:
        FloatExtremes() {
            most_[0] = most_[1] = _mm256_set1_epi32(INT32_MIN);
            top_[0] = top_[1] = _mm256_setzero_si256();
        }

        void add(const __m256* unit) {
            for (int i = 0; i < 4; ++i) {
                const I words = _mm256_castps_si256(unit[i]);
                most_[i % 2] = _mm256_max_epi32(most_[i % 2], words);
                top_[i % 2] = _mm256_max_epu32(top_[i % 2], words);
            }
        }

        void end(uint32_t* high, uint32_t* low) const {
            const I most = _mm256_max_epi32(most_[0], most_[1]);
            const I sign = _mm256_set1_epi32(INT32_MIN);  // turns unsigned order into signed order
            const I top = _mm256_xor_si256(_mm256_max_epu32(top_[0], top_[1]), sign);
            const I four = _mm256_max_epi32(_mm256_unpacklo_epi64(most, top),
                                            _mm256_unpackhi_epi64(most, top));
            const __m128i two = _mm_max_epi32(_mm256_castsi256_si128(four),
                                              _mm256_extracti128_si256(four, 1));
            const __m128i both = _mm_max_epi32(two, _mm_shuffle_epi32(two, 0xB1));
            *high = uint32_t(_mm_cvtsi128_si32(both));
            *low = uint32_t(_mm_extract_epi32(both, 2)) ^ 0x80000000u;
        }
    };

    template <Width W> static void put(const F* unit, uint8_t* codes) {
        if (W == INT3) {
            F halves[4];
            for (int i = 0; i < 4; ++i) halves[i] = add_product(unit[i], all(0.5f), all(-0.5f));
            const I most = _mm256_min_epi8(int8_of(halves), _mm256_set1_epi8(3));  // all >= -4.04
            return put_three_bits(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1),
                                  codes);
        }
        I bytes = int8_of(unit);
        if (W == INT8) return put_at(codes, bytes);
        bytes = _mm256_min_epi8(bytes, _mm256_set1_epi8(7));  // all are >= -8.07 steps
        bytes = _mm256_and_si256(bytes, _mm256_set1_epi8(15));
        const I pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001));  // low + 16 high
        put_half_at(codes, _mm_packus_epi16(_mm256_castsi256_si128(pairs),
                                            _mm256_extracti128_si256(pairs, 1)));
    }

    static void put_two_bits(const F* unit, F distance, uint8_t* codes) {
        const F zero = _mm256_setzero_ps(), below = _mm256_sub_ps(zero, distance);
        I code[4];  // negative
        for (int i = 0; i < 4; ++i) {
            const I low = _mm256_castps_si256(_mm256_cmp_ps(unit[i], below, _CMP_GE_OQ));
            const I middle = _mm256_castps_si256(_mm256_cmp_ps(unit[i], zero, _CMP_GE_OQ));
            const I high = _mm256_castps_si256(_mm256_cmp_ps(unit[i], distance, _CMP_GE_OQ));
            code[i] = _mm256_add_epi32(_mm256_add_epi32(low, middle), high);
        }
        const I bytes = _mm256_abs_epi8(int8s(code[0], code[1], code[2], code[3]));
        const I twos = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x0401));  // first + 4 second
        const I fours = _mm256_madd_epi16(twos, _mm256_set1_epi32(0x00100001));  // first + 16 second
        const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(fours),
                                               _mm256_extracti128_si256(fours, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(codes), _mm_packus_epi16(words, words));
    }

    template <Width W> static void get(const uint8_t* codes, F* unit) {
        if (W == INT8) return load_int8(codes, unit);
        if (is_odd(W)) {
            const F threes = _mm256_setr_ps(-7, -5, -3, -1, 1, 3, 5, 7);  // by the lowest 3 bits
            const F twos = _mm256_setr_ps(-3, -1, 1, 3, -3, -1, 1, 3);
            const I shifts = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                                _mm256_set1_epi32(Codes<W>::BITS));
            for (int i = 0; i < 4; ++i) {
                const I words = _mm256_set1_epi32(eight_codes<W>(codes, i));
                unit[i] = _mm256_permutevar8x32_ps(W == INT3 ? threes : twos,
                                                   _mm256_srlv_epi32(words, shifts));
            }
            return;
        }
        const __m128i value = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
        const __m128i pairs = half_at(codes), nibble = _mm_set1_epi8(15);
        const __m128i low = _mm_shuffle_epi8(value, _mm_and_si128(pairs, nibble));
        const __m128i high =
            _mm_shuffle_epi8(value, _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble));
        const __m128i first = _mm_unpacklo_epi8(low, high), last = _mm_unpackhi_epi8(low, high);
        unit[0] = floats(first);
        unit[1] = floats(_mm_srli_si128(first, 8));
        unit[2] = floats(last);
        unit[3] = floats(_mm_srli_si128(last, 8));
    }

    // Of each two lanes that are swapped: their sum in the first one, their difference in the other
    // one, whose sign is -1. A product with a sign is exact, so that this rounds as an addition does.
    static F butterfly(F x, F swapped, F signs) { return _mm256_fmadd_ps(x, signs, swapped); }

    static void across(F& first, F& second) {
        const F sum = _mm256_add_ps(first, second);
        second = _mm256_sub_ps(first, second);
        first = sum;
    }

    static void rotate(F* unit) {
        const F signs[3] = {_mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1),
                            _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1),
                            _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1)};
        across(unit[0], unit[2]);
        across(unit[1], unit[3]);
        across(unit[0], unit[1]);
        across(unit[2], unit[3]);
        for (int i = 0; i < 4; ++i) {
            unit[i] = butterfly(unit[i], _mm256_permute2f128_ps(unit[i], unit[i], 1), signs[0]);
            unit[i] = butterfly(unit[i], _mm256_permute_ps(unit[i], 0x4E), signs[1]);
            unit[i] = butterfly(unit[i], _mm256_permute_ps(unit[i], 0xB1), signs[2]);
        }
    }

    static void extremes(const uint16_t* from, int64_t size, uint32_t* high, uint32_t* low) {
        I most = _mm256_set1_epi16(INT16_MIN), top = _mm256_setzero_si256();
        for (int64_t i = 0; i < size; i += 16) {
            const I words = at(from + i);
            most = _mm256_max_epi16(most, words);
            top = _mm256_max_epu16(top, words);
        }
        const __m128i sign = _mm_set1_epi16(INT16_MIN);
        const __m128i most8 = _mm_max_epi16(_mm256_castsi256_si128(most),
                                            _mm256_extracti128_si256(most, 1));
        *high = most_unsigned(_mm_xor_si128(most8, sign)) ^ 0x8000u;
        *low = most_unsigned(_mm_max_epu16(_mm256_castsi256_si128(top),
                                           _mm256_extracti128_si256(top, 1)));
    }
};

}  // namespace

const QuantizeKernels AVX2_QUANTIZE = quantize_kernels<Avx2Codes>();

}  // namespace zpp

#endif
