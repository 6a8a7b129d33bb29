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
    static __m256i half_at(const void* from) {
        return _mm256_loadu_si256(static_cast<const __m256i*>(from));
    }
    static void put_half_at(void* to, __m256i value) {
        _mm256_storeu_si256(static_cast<__m256i*>(to), value);
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
};

}  // namespace zpp
