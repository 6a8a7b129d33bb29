// Vectors of 16 floats for x86 with AVX-512 (F, BW, DQ, VL).
#pragma once

#include <immintrin.h>

#include "numbers.h"

namespace zpp {

struct Avx512 {
    static constexpr int64_t WIDTH = 16;
    using F = __m512;
    using I = __m512i;

    static I at(const void* from) { return _mm512_loadu_si512(from); }
    static void put_at(void* to, I value) { _mm512_storeu_si512(to, value); }
    static __m256i half_at(const void* from) {
        return _mm256_loadu_si256(static_cast<const __m256i*>(from));
    }
    static void put_half_at(void* to, __m256i value) {
        _mm256_storeu_si256(static_cast<__m256i*>(to), value);
    }

    static __m128i quarter_at(const void* from) {
        return _mm_loadu_si128(static_cast<const __m128i*>(from));
    }

    static void put_quarter_at(void* to, __m128i value) {
        _mm_storeu_si128(static_cast<__m128i*>(to), value);
    }

    static F all(float value) { return _mm512_set1_ps(value); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F add_product(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

    static __m256i bf16_of(F value) {
        const I bits = _mm512_castps_si512(value);
        const I last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const I up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), last);
        const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        const I nan = _mm512_set1_epi32(int(uint32_t(BF16_NAN) << 16));
        const I rounded = _mm512_mask_mov_epi32(up, is_nan, nan);
        return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
    }

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

    // 64 int8, rounded half to even and saturated.
    static I int8_of(const F* unit) {
        const I a = _mm512_packs_epi32(_mm512_cvtps_epi32(unit[0]), _mm512_cvtps_epi32(unit[1]));
        const I b = _mm512_packs_epi32(_mm512_cvtps_epi32(unit[2]), _mm512_cvtps_epi32(unit[3]));
        const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(a, b));
    }

    static __m512 floats(__m128i int8s) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(int8s));
    }

    static void load_int8(const uint8_t* from, F* unit) {
        for (int i = 0; i < 4; ++i) unit[i] = floats(quarter_at(from + i * WIDTH));
    }
};

}  // namespace zpp
