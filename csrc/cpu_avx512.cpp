// For x86 with AVX-512 (F, BW, DQ, VL); compiled with those flags, else empty.

#include "kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include <immintrin.h>

#include "tiles.h"

namespace zpp {
namespace {

using I = __m512i;

I at(const void* from) { return _mm512_loadu_si512(from); }
__m256i half_at(const void* from) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
__m128i quarter_at(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
void put_half_at(void* to, __m256i value) {
    _mm256_storeu_si256(static_cast<__m256i*>(to), value);
}
void put_quarter_at(void* to, __m128i value) {
    _mm_storeu_si128(static_cast<__m128i*>(to), value);
}

__m256i bf16_of(__m512 value) {
    const I bits = _mm512_castps_si512(value);
    const I last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const I up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), last);
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const I quiet = _mm512_set1_epi32(int(uint32_t(NAN_SCALE) << 16));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(up, nan, quiet), 16));
}

// 16 int8, rounded half to even and saturated.
__m128i rounded(__m512 steps) { return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(steps)); }

__m512 floats(__m128i int8s) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(int8s)); }

// 16 int4 as eight 16-bit words, each two codes: low + 16 high.
__m128i pairs_of(__m512 steps) {
    const __m128i top = _mm_min_epi8(rounded(steps), _mm_set1_epi8(7));  // none below -8.07 steps
    const __m128i bytes = _mm_and_si128(top, _mm_set1_epi8(15));
    return _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001));
}

uint32_t most_unsigned(__m256i words) {  // of sixteen 16-bit words
    const __m128i eight =
        _mm_max_epu16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    const __m128i ones = _mm_set1_epi16(-1);
    return 0xFFFFu ^ uint32_t(_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(eight, ones)), 0));
}

// The extremes of floats, by their bits.
class SeenFloats {
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

struct Avx512 {
    static constexpr int64_t WIDTH = 16;
    using F = __m512;
    using Seen = SeenFloats;

    static F all(float value) { return _mm512_set1_ps(value); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F add_product(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

    template <Type T> static void load(const typename Element<T>::Word* from, F* unit) {
        for (int i = 0; i < 4; ++i) {
            const auto* words = from + i * WIDTH;
            if (T == FP32) {
                unit[i] = _mm512_castsi512_ps(at(words));
            } else if (T == FP16) {
                unit[i] = _mm512_cvtph_ps(half_at(words));
            } else {
                const I wide = _mm512_cvtepu16_epi32(half_at(words));
                unit[i] = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
            }
        }
    }

    template <Type T> static void store(const F* unit, typename Element<T>::Word* to) {
        for (int i = 0; i < 4; ++i) {
            auto* words = to + i * WIDTH;
            if (T == FP32) {
                _mm512_storeu_ps(words, unit[i]);
            } else if (T == FP16) {
                put_half_at(words, _mm512_cvtps_ph(unit[i], _MM_FROUND_TO_NEAREST_INT));
            } else {
                put_half_at(words, bf16_of(unit[i]));
            }
        }
    }

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

const Kernels* avx512_kernels() {
    const bool here = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return here ? kernels_of<Avx512>() : nullptr;
}

}  // namespace zpp

#else

namespace zpp {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace zpp

#endif
