// Steps of codes for x86 with AVX2, FMA and F16C; on other processors this file is empty.

#ifdef __x86_64__

#include "../shared/vector_avx2.h"
#include "cpu_tiles.h"

namespace zpp {
namespace {

struct Avx2Steps : Avx2 {
    static I zeros() { return _mm256_setzero_si256(); }
    static I difference(I a, I b) { return _mm256_subs_epi8(a, b); }
    static I magnitude(I value) {  // the comparison below is signed
        return _mm256_min_epu8(_mm256_abs_epi8(value), _mm256_set1_epi8(127));
    }

    static I count_more(I counts, I magnitudes, uint8_t than) {
        return _mm256_sub_epi8(counts, _mm256_cmpgt_epi8(magnitudes, _mm256_set1_epi8(char(than))));
    }

    static int sum(I counts) {
        const I four = _mm256_sad_epu8(counts, zeros());
        const __m128i two =
            _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
        return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 2);
    }

    template <int REACH> static void put_digits(I distances, uint8_t* digits) {
        const I low = _mm256_max_epi8(distances, _mm256_set1_epi8(-REACH));
        const I steps = _mm256_min_epi8(low, _mm256_set1_epi8(REACH));
        put_at(digits, _mm256_add_epi8(steps, _mm256_set1_epi8(REACH)));
    }
};

}  // namespace

const CodeStepKernels AVX2_CODE_STEPS = code_step_kernels<Avx2Steps>();

}  // namespace zpp

#endif
