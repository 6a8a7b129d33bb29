// The kernels over one tile, for any vector type V. Each instruction set instantiates them.
//
// Besides what ../shared/convert.h needs, V has: put and get, which write and read the codes of a
// unit (UNIT = 4 * WIDTH elements); put_two_bits, by the distance of two codes; rotate, which multiplies each ROTATED elements of a unit by the
// Hadamard matrix; extremes of 16-bit numbers; and FloatExtremes, which collects the extremes of floats.
// The remainder of a segment goes through a zeroed buffer of one unit. Segments of rotated values
// have whole groups of ROTATED elements, so that a unit's other groups are zeros.
#pragma once

#include "cpu_kernels.h"

namespace zpp {

ZPP_HD uint16_t scale_at(const uint8_t* scales, int64_t block) {
    uint16_t scale;
    memcpy(&scale, scales + 2 * block, 2);
    return scale;
}

// A unit of rotated values, or of sums of them, as values: exact, as no result is subnormal.
template <class V> ZPP_INLINE void unrotate_unit(typename V::F* unit) {
    V::rotate(unit);
    const typename V::F share = V::all(1.0f / ROTATED);
    for (int i = 0; i < 4; ++i) unit[i] = V::mul(unit[i], share);
}

// One block of one segment: elements of type T, codes of width W. Its loops are compiled twice: for
// a whole block, whose size is then a constant, and for the rest of a segment.
template <class V, Type T, Width W> struct Block {
    using Word = typename Element<T>::Word;
    using F = typename V::F;

    ZPP_INLINE void extremes(const Word* values, int64_t size, uint32_t* high, uint32_t* low) {
        const int64_t whole = size / UNIT<V> * UNIT<V>, left = size - whole;
        *high = uint32_t(1) << (8 * sizeof(Word) - 1);  // the smallest signed and
        *low = 0;                                       // unsigned words
        if constexpr (T == FP32) {
            typename V::FloatExtremes tracker;
            for (int64_t i = 0; i < whole; i += UNIT<V>) {
                F unit[4];
                V::template load<FP32>(values + i, unit);
                tracker.add(unit);
            }
            tracker.end(high, low);
        } else if (whole) {
            V::extremes(values, whole, high, low);
        }
        for (int64_t i = 0; i < left; ++i) {
            Word word;
            memcpy(&word, values + whole + i, sizeof(Word));
            const uint32_t flip = uint32_t(1) << (8 * sizeof(Word) - 1);
            if ((word ^ flip) > (*high ^ flip)) *high = word;
            if (word > *low) *low = word;
        }
    }

    ZPP_INLINE void encode(const Word* values, uint8_t* codes, float factor) {
        F unit[4];
        V::template load<T>(values, unit);
        const F factors = V::all(factor);
        if constexpr (W == INT2) {
            V::put_two_bits(unit, factors, codes);
        } else {
            for (int i = 0; i < 4; ++i) unit[i] = V::mul(unit[i], factors);
            V::template put<W>(unit, codes);
        }
    }

    ZPP_INLINE void quantize(const Word* values, uint8_t* codes, float factor, int64_t size) {
        constexpr int BITS = Codes<W>::BITS;
        const int64_t whole = size / UNIT<V> * UNIT<V>, left = size - whole;
        for (int64_t i = 0; i < whole; i += UNIT<V>) {
            encode(values + i, codes + i * BITS / 8, factor);
        }
        if (!left) return;
        Word last[UNIT<V>] = {};
        uint8_t coded[UNIT<V>];
        memcpy(last, values + whole, size_t(left) * sizeof(Word));
        encode(last, coded, factor);
        memcpy(codes + whole * BITS / 8, coded, size_t((left * BITS + 7) / 8));
    }

    ZPP_INLINE void decode(const uint8_t* codes, Word* values, float scale) {
        F unit[4];
        V::template get<W>(codes, unit);
        const F scales = V::all(scale), zero = V::all(0.0f);
        for (int i = 0; i < 4; ++i) unit[i] = V::add_product(unit[i], scales, zero);
        if constexpr (Codes<W>::IS_ROTATED) unrotate_unit<V>(unit);
        V::template store<T>(unit, values);
    }

    ZPP_INLINE void dequantize(const uint8_t* codes, Word* values, uint16_t scale, int64_t size) {
        constexpr int BITS = Codes<W>::BITS;
        const float factor = from_bf16(scale);
        const int64_t whole = size / UNIT<V> * UNIT<V>, left = size - whole;
        for (int64_t i = 0; i < whole; i += UNIT<V>) {
            decode(codes + i * BITS / 8, values + i, factor);
        }
        if (!left) return;
        uint8_t coded[UNIT<V>] = {};
        Word last[UNIT<V>];
        memcpy(coded, codes + whole * BITS / 8, size_t((left * BITS + 7) / 8));
        decode(coded, last, factor);
        memcpy(values + whole, last, size_t(left) * sizeof(Word));
    }
};

// Quantize a tile, given the extremes of its blocks, and for INT8 maybe the scales that are held. All
// scales are computed first, so that the compiler can vectorize over blocks.
template <class V, Type T, Width W>
ZPP_INLINE void quantize_blocks(const typename Element<T>::Word* values, const uint32_t* high,
                                const uint32_t* low, uint8_t* codes, uint8_t* scales, int64_t size,
                                const uint8_t* held_scales = nullptr) {
    using B = Block<V, T, W>;
    constexpr int64_t BLOCK = Codes<W>::BLOCK, BITS = Codes<W>::BITS;
    constexpr int64_t BLOCKS = TILE / BLOCK;
    constexpr uint32_t SIGN = uint32_t(1) << (8 * sizeof(typename B::Word) - 1);
    const int64_t whole = size / BLOCK, left = size % BLOCK, blocks = whole + (left != 0);
    uint16_t scale[BLOCKS];
    float factors[BLOCKS];
    uint16_t held[BLOCKS] = {};
    if (held_scales) memcpy(held, held_scales, size_t(blocks) * 2);
    for (int64_t i = 0; i < BLOCKS; ++i) {  // of a whole tile: a constant count
        const float extreme = to_float<T>(extreme_bits(high[i], low[i], SIGN));
        const uint32_t bits = held_scales ? scale_after(extreme, held[i]) : scale_of(extreme, W);
        scale[i] = uint16_t(bits);
        factors[i] = factor_of(bits, W);
    }
    memcpy(scales, scale, size_t(blocks) * 2);
    for (int64_t i = 0; i < whole; ++i) {
        uint8_t* target = codes + i * BLOCK * BITS / 8;
        if (factors[i] == 0.0f) {
            memset(target, 0, BLOCK * BITS / 8);
        } else {
            B::quantize(values + i * BLOCK, target, factors[i], BLOCK);
        }
    }
    if (!left) return;
    uint8_t* target = codes + whole * BLOCK * BITS / 8;
    if (factors[whole] == 0.0f) {
        memset(target, 0, size_t((left * BITS + 7) / 8));
    } else {
        B::quantize(values + whole * BLOCK, target, factors[whole], left);
    }
}

template <class V, Type T, Width W>
ZPP_INLINE void quantize_whole(const void* from, const uint8_t* held_scales, uint8_t* codes,
                               uint8_t* scales, int64_t size) {
    using B = Block<V, T, W>;
    constexpr int64_t BLOCK = Codes<W>::BLOCK;
    const auto* values = static_cast<const typename B::Word*>(from);
    const int64_t whole = size / BLOCK, left = size % BLOCK;
    uint32_t high[TILE / BLOCK] = {}, low[TILE / BLOCK] = {};
    for (int64_t i = 0; i < whole; ++i) {
        B::extremes(values + i * BLOCK, BLOCK, high + i, low + i);
    }
    if (left) B::extremes(values + whole * BLOCK, left, high + whole, low + whole);
    quantize_blocks<V, T, W>(values, high, low, codes, scales, size, held_scales);
}

template <class V, Type T, Width W>
static void quantize_tile(const void* from, uint8_t* codes, uint8_t* scales, int64_t size) {
    quantize_whole<V, T, W>(from, nullptr, codes, scales, size);
}

template <class V, Type T>
static void requantize_tile(const void* from, const uint8_t* held_scales, uint8_t* codes,
                            uint8_t* scales, int64_t size) {
    quantize_whole<V, T, INT8>(from, held_scales, codes, scales, size);
}

// Rotate a block, or what there is of it, and find its extremes.
template <class V, Type T>
ZPP_INLINE void rotate_block(const typename Element<T>::Word* values, uint32_t* rotated,
                             int64_t size, uint32_t* high, uint32_t* low) {
    typename V::FloatExtremes tracker;
    typename V::F unit[4];
    const int64_t whole = size / UNIT<V> * UNIT<V>, left = size - whole;
    for (int64_t i = 0; i < whole; i += UNIT<V>) {
        V::template load<T>(values + i, unit);
        V::rotate(unit);
        tracker.add(unit);
        V::template store<FP32>(unit, rotated + i);
    }
    if (left) {
        typename Element<T>::Word last[UNIT<V>] = {};
        memcpy(last, values + whole, size_t(left) * sizeof(last[0]));
        V::template load<T>(last, unit);
        V::rotate(unit);
        tracker.add(unit);
        uint32_t words[UNIT<V>];
        V::template store<FP32>(unit, words);
        memcpy(rotated + whole, words, size_t(left) * 4);
    }
    tracker.end(high, low);
}

template <class V, Type T, Width W>
static void quantize_rotated(const void* from, uint8_t* codes, uint8_t* scales, int64_t size) {
    constexpr int64_t BLOCK = Codes<W>::BLOCK;
    const auto* values = static_cast<const typename Element<T>::Word*>(from);
    alignas(64) uint32_t rotated[TILE];
    uint32_t high[TILE / BLOCK] = {}, low[TILE / BLOCK] = {};
    const int64_t whole = size / BLOCK, left = size % BLOCK, rest = whole * BLOCK;
    for (int64_t i = 0; i < whole; ++i) {
        const int64_t at = i * BLOCK;
        rotate_block<V, T>(values + at, rotated + at, BLOCK, high + i, low + i);
    }
    if (left) rotate_block<V, T>(values + rest, rotated + rest, left, high + whole, low + whole);
    quantize_blocks<V, FP32, W>(rotated, high, low, codes, scales, size);
}

template <class V> static void unrotate(float* sums, int64_t size) {
    typename V::F unit[4];
    auto* words = reinterpret_cast<uint32_t*>(sums);
    const int64_t whole = size / UNIT<V> * UNIT<V>, left = size - whole;
    for (int64_t i = 0; i < whole; i += UNIT<V>) {
        V::template load<FP32>(words + i, unit);
        unrotate_unit<V>(unit);
        V::template store<FP32>(unit, words + i);
    }
    if (!left) return;
    uint32_t last[UNIT<V>] = {};
    memcpy(last, words + whole, size_t(left) * 4);
    V::template load<FP32>(last, unit);
    unrotate_unit<V>(unit);
    V::template store<FP32>(unit, last);
    memcpy(words + whole, last, size_t(left) * 4);
}

template <class V, Width W>
static void quantize_sum(const float* sums, const Extremes* extremes, uint8_t* codes,
                         uint8_t* scales, int64_t size) {
    constexpr int64_t BLOCK = Codes<W>::BLOCK, CHUNKS = BLOCK / CHUNK;
    if (CHUNKS == 0 || extremes == nullptr) {
        return quantize_tile<V, FP32, W>(sums, codes, scales, size);
    }
    uint32_t high[TILE / BLOCK], low[TILE / BLOCK];
    for (int64_t i = 0; i < TILE / BLOCK; ++i) {
        high[i] = extremes->high[i * CHUNKS];
        low[i] = extremes->low[i * CHUNKS];
        for (int64_t j = i * CHUNKS + 1; j < (i + 1) * CHUNKS; ++j) {
            if (int32_t(extremes->high[j]) > int32_t(high[i])) high[i] = extremes->high[j];
            if (extremes->low[j] > low[i]) low[i] = extremes->low[j];
        }
    }
    const auto* words = reinterpret_cast<const uint32_t*>(sums);
    quantize_blocks<V, FP32, W>(words, high, low, codes, scales, size);
}

template <class V, Type T, Width W>
static void dequantize_tile(Coded from, void* to, int64_t size) {
    using B = Block<V, T, W>;
    constexpr int64_t BLOCK = Codes<W>::BLOCK, BITS = Codes<W>::BITS;
    auto* values = static_cast<typename B::Word*>(to);
    const int64_t whole = size / BLOCK, left = size % BLOCK;
    for (int64_t i = 0; i < whole; ++i) {
        const uint8_t* codes = from.codes + i * BLOCK * BITS / 8;
        B::dequantize(codes, values + i * BLOCK, scale_at(from.scales, i), BLOCK);
    }
    if (!left) return;
    const uint8_t* codes = from.codes + whole * BLOCK * BITS / 8;
    B::dequantize(codes, values + whole * BLOCK, scale_at(from.scales, whole), left);
}

template <Width W> constexpr int64_t SUM_CHUNK = W == INT3 ? BLOCK3 : CHUNK;

// Add the codes of COUNT terms of a chunk to sums; FRESH sums start from zero.
template <class V, Width W, int COUNT, bool FRESH, bool TRACK>
ZPP_INLINE void add_units(const uint8_t* const* codes, const float* scales, float* sums,
                          typename V::FloatExtremes* tracker) {
    using F = typename V::F;
    F factors[COUNT];
    for (int term = 0; term < COUNT; ++term) factors[term] = V::all(scales[term]);
    for (int64_t i = 0; i < SUM_CHUNK<W>; i += UNIT<V>) {
        F unit[4], total[4] = {V::all(0.0f), V::all(0.0f), V::all(0.0f), V::all(0.0f)};
        auto* words = reinterpret_cast<uint32_t*>(sums + i);
        if (!FRESH) V::template load<FP32>(words, total);
        for (int term = 0; term < COUNT; ++term) {
            V::template get<W>(codes[term] + i * Codes<W>::BITS / 8, unit);
            for (int j = 0; j < 4; ++j) {
                total[j] = V::add_product(unit[j], factors[term], total[j]);
            }
        }
        if (TRACK) tracker->add(total);
        V::template store<FP32>(total, words);
    }
}

// Copy the codes of the rest of a segment to whole chunks. Those beyond the end are 0: if that stands
// for 0, they do not change the extremes of the others.
template <Width W>
static void pad_terms(const uint8_t** codes, int count, int64_t size, uint8_t* padded) {
    constexpr int64_t BYTES = SUM_CHUNK<W> * Codes<W>::BITS / 8;
    memset(padded, 0, size_t(count * BYTES));
    for (int term = 0; term < count; ++term, padded += BYTES) {
        memcpy(padded, codes[term], size_t((size * Codes<W>::BITS + 7) / 8));
        if (W == INT4 && size % 2) padded[size / 2] &= 15;
        codes[term] = padded;
    }
}

template <class V, Width W, int COUNT, bool FRESH, bool TRACK>
static void sum_terms(const Coded* terms, float* sums, int64_t size, Extremes* extremes) {
    constexpr int64_t CHUNK = SUM_CHUNK<W>;
    for (int64_t i = 0; i < size; i += CHUNK) {
        const uint8_t* codes[COUNT];
        float scales[COUNT];
        for (int term = 0; term < COUNT; ++term) {
            codes[term] = terms[term].codes + i * Codes<W>::BITS / 8;
            scales[term] = from_bf16(scale_at(terms[term].scales, i / Codes<W>::BLOCK));
            const uint8_t* next_tile = codes[term] + TILE * Codes<W>::BITS / 8;
            for (int line = 0; line < CHUNK * Codes<W>::BITS / 8; line += 64) {
                __builtin_prefetch(next_tile + line);
            }
        }
        const int64_t left = size - i;
        uint8_t padded[COUNT * CHUNK * Codes<W>::BITS / 8];
        float rest[CHUNK];
        float* target = left < CHUNK ? rest : sums + i;
        if (left < CHUNK) {
            pad_terms<W>(codes, COUNT, left, padded);
            memset(rest, 0, sizeof(rest));
            memcpy(rest, sums + i, size_t(left) * 4);
        }
        typename V::FloatExtremes tracker;
        add_units<V, W, COUNT, FRESH, TRACK>(codes, scales, target, &tracker);
        if (left < CHUNK) memcpy(sums + i, rest, size_t(left) * 4);
        if (TRACK) tracker.end(extremes->high + i / CHUNK, extremes->low + i / CHUNK);
    }
}

template <class V, Width W, int COUNT, bool TRACK>
static void sum_tile_of(const Coded* terms, bool fresh, float* sums, int64_t size,
                        Extremes* extremes) {
    if (fresh) return sum_terms<V, W, COUNT, true, TRACK>(terms, sums, size, extremes);
    sum_terms<V, W, COUNT, false, TRACK>(terms, sums, size, extremes);
}

template <class V, Width W, bool TRACK>
static void sum_some(const Coded* terms, int count, bool fresh, float* sums, int64_t size,
                     Extremes* extremes) {
    if (count == 8) return sum_tile_of<V, W, 8, TRACK>(terms, fresh, sums, size, extremes);
    if (count > 4) {
        sum_tile_of<V, W, 4, false>(terms, fresh, sums, size, nullptr);
        return sum_some<V, W, TRACK>(terms + 4, count - 4, false, sums, size, extremes);
    }
    if (count == 4) return sum_tile_of<V, W, 4, TRACK>(terms, fresh, sums, size, extremes);
    if (count == 3) return sum_tile_of<V, W, 3, TRACK>(terms, fresh, sums, size, extremes);
    if (count == 2) return sum_tile_of<V, W, 2, TRACK>(terms, fresh, sums, size, extremes);
    sum_tile_of<V, W, 1, TRACK>(terms, fresh, sums, size, extremes);
}

template <class V, Width W>
static void sum_tile(const Coded* terms, int count, bool fresh, float* sums, int64_t size,
                     Extremes* extremes) {
    if (is_odd(W) || extremes == nullptr) {
        return sum_some<V, W, false>(terms, count, fresh, sums, size, nullptr);
    }
    for (int64_t i = 0; i < TILE / CHUNK; ++i) {
        extremes->high[i] = 0x80000000u;  // the smallest signed and unsigned words
        extremes->low[i] = 0;
    }
    sum_some<V, W, true>(terms, count, fresh, sums, size, extremes);
}

template <class V, Type T>
static void sum_raw_tile(const void* from, float* sums, int64_t size) {
    float values[TILE];
    convert<V, T, FP32>(from, values, size);
    for (int64_t i = 0; i < size; ++i) sums[i] += values[i];
}

template <class V, Type T, Width W> constexpr Quantize quantizer() {
    if constexpr (is_rotated(W)) return quantize_rotated<V, T, W>;
    else return quantize_tile<V, T, W>;
}

template <class V, Width W> constexpr WidthKernels width_kernels() {
    return {
        {quantizer<V, BF16, W>(), quantizer<V, FP16, W>(), quantizer<V, FP32, W>()},
        {dequantize_tile<V, BF16, W>, dequantize_tile<V, FP16, W>, dequantize_tile<V, FP32, W>},
        sum_tile<V, W == ROTATED4 ? INT4 : W>,
        quantize_sum<V, W>,
    };
}

template <class V> constexpr QuantizeKernels quantize_kernels() {
    return {
        {width_kernels<V, INT8>(), width_kernels<V, INT4>(), width_kernels<V, INT3>(),
         width_kernels<V, ROTATED4>(), width_kernels<V, INT2>()},
        {requantize_tile<V, BF16>, requantize_tile<V, FP16>, requantize_tile<V, FP32>},
        conversions<V>(),
        {sum_raw_tile<V, BF16>, sum_raw_tile<V, FP16>, sum_raw_tile<V, FP32>},
        unrotate<V>,
    };
}

}  // namespace zpp
