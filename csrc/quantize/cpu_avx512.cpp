// Quantization for x86 with AVX-512 (F, BW, DQ, VL); on other processors this file is empty.

#ifdef __x86_64__

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || \
    !defined(__AVX512VL__)
#error "compile this file with the flags that csrc/flags.py has for it"
#endif

#include "../shared/vector_avx512.h"
#include "cpu_tiles.h"

namespace zpp {
namespace {

struct Avx512Codes : Avx512 {
    static __m128i quarter_at(const void* from) {
        return _mm_loadu_si128(static_cast<const __m128i*>(from));
    }
    static void put_quarter_at(void* to, __m128i value) {
        _mm_storeu_si128(static_cast<__m128i*>(to), value);
    }

    // 16 int8, rounded half to even and saturated.
    static __m128i rounded(__m512 steps) {
        return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(steps));
    }

    static __m512 floats(__m128i int8s) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(int8s));
    }

    // 16 int4 as eight 16-bit words, each two codes: low + 16 high.
    static __m128i pairs_of(__m512 steps) {
        const __m128i top = _mm_min_epi8(rounded(steps), _mm_set1_epi8(7));  // all >= -8.07
        const __m128i bytes = _mm_and_si128(top, _mm_set1_epi8(15));
        return _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001));
    }

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
        for (int i = 0; i < 4; i += 2) {
            if (W == INT8) {
                put_quarter_at(codes + 16 * i, rounded(unit[i]));
                put_quarter_at(codes + 16 * i + 16, rounded(unit[i + 1]));
            } else {
                const __m128i both = _mm_packus_epi16(pairs_of(unit[i]), pairs_of(unit[i + 1]));
                put_quarter_at(codes + 8 * i, both);
            }
        }
    }

    template <Width W> static void get(const uint8_t* codes, F* unit) {
        const __m128i value = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
        const __m128i nibble = _mm_set1_epi8(15);
        for (int i = 0; i < 4; i += 2) {
            if (W == INT8) {
                unit[i] = floats(quarter_at(codes + 16 * i));
                unit[i + 1] = floats(quarter_at(codes + 16 * i + 16));
                continue;
            }
            const __m128i pairs = quarter_at(codes + 8 * i);
            const __m128i low = _mm_shuffle_epi8(value, _mm_and_si128(pairs, nibble));
            const __m128i high =
                _mm_shuffle_epi8(value, _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble));
            unit[i] = floats(_mm_unpacklo_epi8(low, high));
            unit[i + 1] = floats(_mm_unpackhi_epi8(low, high));
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
