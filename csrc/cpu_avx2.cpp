// For x86 with AVX2, FMA and F16C; compiled with those flags, else empty.

#include "kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

#include "tiles.h"

namespace zpp {
namespace {

using I = __m256i;

I at(const void* from) { return _mm256_loadu_si256(static_cast<const I*>(from)); }
void put_at(void* to, I value) { _mm256_storeu_si256(static_cast<I*>(to), value); }
__m128i half_at(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
void put_half_at(void* to, __m128i value) { _mm_storeu_si128(static_cast<__m128i*>(to), value); }

// The bits of bf16 in the lower half of each 32-bit lane.
I bf16_of(__m256 value) {
    const I bits = _mm256_castps_si256(value);
    const I last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const I up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), last);
    const I nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const I quiet = _mm256_set1_epi32(int(uint32_t(NAN_SCALE) << 16));
    return _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
}

// The 32 int8 of four vectors of floats, rounded half to even and saturated; four from the lower
// half of each vector, then four from the upper half of each.
I rounded(const __m256* unit) {
    const I a = _mm256_packs_epi32(_mm256_cvtps_epi32(unit[0]), _mm256_cvtps_epi32(unit[1]));
    const I b = _mm256_packs_epi32(_mm256_cvtps_epi32(unit[2]), _mm256_cvtps_epi32(unit[3]));
    return _mm256_packs_epi16(a, b);
}

__m256 floats(__m128i int8s) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(int8s)); }

uint32_t most_unsigned(__m128i words) {  // of eight 16-bit words
    const __m128i ones = _mm_set1_epi16(-1);
    return 0xFFFFu ^ uint32_t(_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(words, ones)), 0));
}

// The extremes of floats, by their bits; two chains, which run side by side.
class SeenFloats {
    I most_[2], top_[2];

public:
    SeenFloats() {
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

struct Avx2 {
    static constexpr int64_t WIDTH = 8;
    using F = __m256;
    using Seen = SeenFloats;

    static F all(float value) { return _mm256_set1_ps(value); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F add_product(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }

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

    template <Width W> static void put(const F* unit, uint8_t* codes) {
        I bytes = rounded(unit);
        if (W == INT8) {
            const I order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            put_at(codes, _mm256_permutevar8x32_epi32(bytes, order));
            return;
        }
        bytes = _mm256_min_epi8(bytes, _mm256_set1_epi8(7));  // none is below -8.07 steps
        bytes = _mm256_and_si256(bytes, _mm256_set1_epi8(15));
        const I pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001));  // low + 16 high
        const __m128i packed = _mm_packus_epi16(_mm256_castsi256_si128(pairs),
                                                _mm256_extracti128_si256(pairs, 1));
        const __m128i order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
        put_half_at(codes, _mm_shuffle_epi8(packed, order));
    }

    template <Width W> static void get(const uint8_t* codes, F* unit) {
        if (W == INT8) {
            for (int i = 0; i < 4; ++i) {
                unit[i] = floats(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + 8 * i)));
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

const Kernels* avx2_kernels() {
    const bool here = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    return here ? kernels_of<Avx2>() : nullptr;
}

}  // namespace zpp

#else

namespace zpp {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace zpp

#endif
