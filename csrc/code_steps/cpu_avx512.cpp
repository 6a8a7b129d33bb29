// Steps of codes for x86 with AVX-512 (F, BW, DQ, VL); on other processors this file is empty.

#ifdef __x86_64__

#include "../shared/vector_avx512.h"
#include "cpu_tiles.h"

namespace zpp {
namespace {

struct Avx512Steps : Avx512 {
    static I zeros() { return _mm512_setzero_si512(); }
    static I difference(I a, I b) { return _mm512_subs_epi8(a, b); }
    static I magnitude(I value) { return _mm512_abs_epi8(value); }

    static I count_more(I counts, I magnitudes, uint8_t than) {
        const __mmask64 more = _mm512_cmpgt_epu8_mask(magnitudes, _mm512_set1_epi8(char(than)));
        return _mm512_mask_sub_epi8(counts, more, counts, _mm512_set1_epi8(-1));
    }

    static int sum(I counts) {
        int64_t parts[8];
        put_at(parts, _mm512_sad_epu8(counts, zeros()));
        int64_t total = 0;
        for (const int64_t part : parts) total += part;
        return int(total);
    }

    template <int REACH> static void put_digits(I distances, uint8_t* digits) {
        const I low = _mm512_max_epi8(distances, _mm512_set1_epi8(-REACH));
        const I steps = _mm512_min_epi8(low, _mm512_set1_epi8(REACH));
        put_at(digits, _mm512_add_epi8(steps, _mm512_set1_epi8(REACH)));
    }
};

}  // namespace

const CodeStepKernels AVX512_CODE_STEPS = code_step_kernels<Avx512Steps>();

}  // namespace zpp

#endif
