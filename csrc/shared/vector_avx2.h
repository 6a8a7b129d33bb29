// Vectors of eight floats for x86 with AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include "numbers.h"

namespace zpp {

struct Avx2 {
    static constexpr int64_t WIDTH = 8;
    using F = __m256;
    using I = __m256i;

    static I at(const void* from) { return _mm256_loadu_si256(static_cast<const I*>(from)); }
    static void put_at(void* to, I value) { _mm256_storeu_si256(static_cast<I*>(to), value); }
    static __m128i half_at(const void* from) {
        return _mm_loadu_si128(static_cast<const __m128i*>(from));
    }
    static void put_half_at(void* to, __m128i value) {
        _mm_storeu_si128(static_cast<__m128i*>(to), value);
    }

    static F all(float value) { return _mm256_set1_ps(value); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F add_product(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }

    // The bits of bf16 in the lower half of each 32-bit lane.
    static I bf16_of(F value) {
        const I bits = _mm256_castps_si256(value);
        const I last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const I up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), last);
        const I is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
        const I nan = _mm256_set1_epi32(int(uint32_t(BF16_NAN) << 16));
        return _mm256_srli_epi32(_mm256_blendv_epi8(up, nan, is_nan), 16);
    }

    template <Type T> static void load(const typename Element<T>::Word* from, F* unit) {
        for (int i = 0; i < 4; ++i) {
            const auto* words = from + i * WIDTH;
            if (T == FP32) {
                unit[i] = _mm256_castsi256_ps(at(words));
            } else if (T == FP16) {
                unit[i] = _mm256_cvtph_ps(half_at(words));
            } else {
                const I wide = _mm256_cvtepu16_epi32(half_at(words));
                unit[i] = _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
            }
        }
    }

    template <Type T> static void store(const F* unit, typename Element<T>::Word* to) {
        if (T == BF16) {
            for (int i = 0; i < 4; i += 2) {
                const I both = _mm256_packus_epi32(bf16_of(unit[i]), bf16_of(unit[i + 1]));
                put_at(to + i * WIDTH, _mm256_permute4x64_epi64(both, 0xD8));
            }
            return;
        }
        for (int i = 0; i < 4; ++i) {
            if (T == FP32) {
                put_at(to + i * WIDTH, _mm256_castps_si256(unit[i]));
            } else {
                put_half_at(to + i * WIDTH, _mm256_cvtps_ph(unit[i], _MM_FROUND_TO_NEAREST_INT));
            }
        }
    }

    // 32 integers as int8, saturated.
    static I int8s(I first, I second, I third, I fourth) {
        const I bytes = _mm256_packs_epi16(_mm256_packs_epi32(first, second),
                                           _mm256_packs_epi32(third, fourth));
        return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    }

    // 32 int8, rounded half to even and saturated.
    static I int8_of(const F* unit) {
        return int8s(_mm256_cvtps_epi32(unit[0]), _mm256_cvtps_epi32(unit[1]),
                     _mm256_cvtps_epi32(unit[2]), _mm256_cvtps_epi32(unit[3]));
    }

    static __m256 floats(__m128i int8s) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(int8s));
    }

    static void load_int8(const uint8_t* from, F* unit) {
        for (int i = 0; i < 4; ++i) {
            const uint8_t* eight = from + i * WIDTH;
            unit[i] = floats(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(eight)));
        }
    }
};

}  // namespace zpp
