// The kernels over one tile, for any vector type V. Each instruction set instantiates them.
//
// V has: F, a vector of WIDTH floats; load and store of four of them for each element type; the
// same for codes (get, put); extremes. All of them work on UNIT = 4 * WIDTH elements; what is left
// over at the end of a segment goes through a zeroed buffer of one unit.
#pragma once

#include "adam_loops.h"
#include "kernels.h"
#include "quant_math.h"

namespace zpp {

// Loops over a block are compiled twice: for a whole block, whose size is then known, and for less.
#define ZPP_INLINE static inline __attribute__((always_inline))

template <class V> constexpr int64_t UNIT = 4 * V::WIDTH;

template <Type T> ZPP_HD float widen(uint32_t word) {
    return T == BF16   ? from_bf16(uint16_t(word))
           : T == FP16 ? from_fp16(uint16_t(word))
                       : float_of(word);
}

ZPP_HD uint16_t scale_at(const uint8_t* scales, int64_t block) {
    uint16_t scale;
    memcpy(&scale, scales + 2 * block, 2);
    return scale;
}

// One block of one segment: elements of type T, codes of width W.
template <class V, Type T, Width W> struct Block {
    using Word = typename Element<T>::Word;
    using F = typename V::F;

    ZPP_INLINE void extremes(const Word* values, int64_t size, uint32_t* high, uint32_t* low) {
        const int64_t whole = size / UNIT<V> * UNIT<V>, left = size - whole;
        *high = uint32_t(1) << (8 * sizeof(Word) - 1);  // the least signed word, and the least
        *low = 0;                                       // unsigned one: neutral
        if constexpr (T == FP32) {
            typename V::Seen seen;
            for (int64_t i = 0; i < whole; i += UNIT<V>) {
                F unit[4];
                V::template load<FP32>(values + i, unit);
                seen.add(unit);
            }
            seen.end(high, low);
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
        for (int i = 0; i < 4; ++i) unit[i] = V::mul(unit[i], factors);
        V::template put<W>(unit, codes);
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

// From the extremes of each block. All scales come first: several blocks' at a time, in vectors where
// the compiler sees them.
template <class V, Type T, Width W>
ZPP_INLINE void quantize_blocks(const typename Element<T>::Word* values, const uint32_t* high,
                                const uint32_t* low, uint8_t* codes, uint8_t* scales,
                                int64_t size) {
    using B = Block<V, T, W>;
    constexpr int64_t BLOCK = Codes<W>::BLOCK, BITS = Codes<W>::BITS;
    constexpr int64_t BLOCKS = TILE / BLOCK;
    constexpr uint32_t SIGN = uint32_t(1) << (8 * sizeof(typename B::Word) - 1);
    const int64_t whole = size / BLOCK, left = size % BLOCK, blocks = whole + (left != 0);
    uint16_t scale[BLOCKS];
    float factors[BLOCKS];
    for (int64_t i = 0; i < BLOCKS; ++i) {  // all of a tile's, so that the count is known
        const uint32_t bits = scale_of(widen<T>(extreme_bits(high[i], low[i], SIGN)), BITS);
        scale[i] = uint16_t(bits);
        factors[i] = steps_per_unit(bits);
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
static void quantize_tile(const void* from, uint8_t* codes, uint8_t* scales, int64_t size) {
    using B = Block<V, T, W>;
    constexpr int64_t BLOCK = Codes<W>::BLOCK;
    const auto* values = static_cast<const typename B::Word*>(from);
    const int64_t whole = size / BLOCK, left = size % BLOCK;
    uint32_t high[TILE / BLOCK] = {}, low[TILE / BLOCK] = {};
    for (int64_t i = 0; i < whole; ++i) {
        B::extremes(values + i * BLOCK, BLOCK, high + i, low + i);
    }
    if (left) B::extremes(values + whole * BLOCK, left, high + whole, low + whole);
    quantize_blocks<V, T, W>(values, high, low, codes, scales, size);
}

template <class V, Width W>
static void quantize_sum(const float* sums, const Extremes& extremes, uint8_t* codes,
                         uint8_t* scales, int64_t size) {
    constexpr int64_t BLOCK = Codes<W>::BLOCK, CHUNKS = BLOCK / CHUNK;
    uint32_t high[TILE / BLOCK], low[TILE / BLOCK];
    for (int64_t i = 0; i < TILE / BLOCK; ++i) {
        high[i] = extremes.high[i * CHUNKS];
        low[i] = extremes.low[i * CHUNKS];
        for (int64_t j = i * CHUNKS + 1; j < (i + 1) * CHUNKS; ++j) {
            if (int32_t(extremes.high[j]) > int32_t(high[i])) high[i] = extremes.high[j];
            if (extremes.low[j] > low[i]) low[i] = extremes.low[j];
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

template <class V, Type FROM, Type TO>
static void convert_tile(const void* from, void* to, int64_t size) {
    using In = typename Element<FROM>::Word;
    using Out = typename Element<TO>::Word;
    if (FROM == TO) {
        memcpy(to, from, size_t(size) * sizeof(In));
        return;
    }
    const auto* source = static_cast<const In*>(from);
    auto* target = static_cast<Out*>(to);
    const int64_t whole = size / UNIT<V> * UNIT<V>, left = size - whole;
    typename V::F unit[4];
    for (int64_t i = 0; i < whole; i += UNIT<V>) {
        V::template load<FROM>(source + i, unit);
        V::template store<TO>(unit, target + i);
    }
    if (!left) return;
    In first[UNIT<V>] = {};
    Out last[UNIT<V>];
    memcpy(first, source + whole, size_t(left) * sizeof(In));
    V::template load<FROM>(first, unit);
    V::template store<TO>(unit, last);
    memcpy(target + whole, last, size_t(left) * sizeof(Out));
}

// sums += the codes of COUNT terms of a chunk, for whole units; they begin with zeros if FRESH.
template <class V, Width W, int COUNT, bool FRESH, bool SEE>
ZPP_INLINE void add_units(const uint8_t* const* codes, const float* scales, float* sums,
                          int64_t size, typename V::Seen* seen) {
    using F = typename V::F;
    F factors[COUNT];
    for (int term = 0; term < COUNT; ++term) factors[term] = V::all(scales[term]);
    for (int64_t i = 0; i < size; i += UNIT<V>) {
        F unit[4], total[4] = {V::all(0.0f), V::all(0.0f), V::all(0.0f), V::all(0.0f)};
        auto* words = reinterpret_cast<uint32_t*>(sums + i);
        if (!FRESH) V::template load<FP32>(words, total);
        for (int term = 0; term < COUNT; ++term) {
            V::template get<W>(codes[term] + i * Codes<W>::BITS / 8, unit);
            for (int j = 0; j < 4; ++j) {
                total[j] = V::add_product(unit[j], factors[term], total[j]);
            }
        }
        if (SEE) seen->add(total);
        V::template store<FP32>(total, words);
    }
}

// Codes beyond the end count as zeros, which change no extreme of the others.
template <class V, Width W, int COUNT, bool FRESH, bool SEE>
ZPP_INLINE void add_chunk(const uint8_t* const* codes, const float* scales, float* sums,
                          int64_t size, typename V::Seen* seen) {
    const int64_t whole = size / UNIT<V> * UNIT<V>, left = size - whole;
    add_units<V, W, COUNT, FRESH, SEE>(codes, scales, sums, whole, seen);
    if (!left) return;
    uint8_t coded[COUNT][UNIT<V>] = {};
    const uint8_t* last[COUNT];
    for (int term = 0; term < COUNT; ++term) {
        const uint8_t* from = codes[term] + whole * Codes<W>::BITS / 8;
        memcpy(coded[term], from, size_t((left * Codes<W>::BITS + 7) / 8));
        if (W == INT4 && left % 2) coded[term][left / 2] &= 15;
        last[term] = coded[term];
    }
    float total[UNIT<V>] = {};
    if (!FRESH) memcpy(total, sums + whole, size_t(left) * 4);
    add_units<V, W, COUNT, FRESH, SEE>(last, scales, total, UNIT<V>, seen);
    memcpy(sums + whole, total, size_t(left) * 4);
}

template <class V, Width W, int COUNT, bool FRESH, bool SEE>
static void sum_terms(const Coded* terms, float* sums, int64_t size, Extremes* extremes) {
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
        typename V::Seen seen;
        if (size - i >= CHUNK) {
            add_chunk<V, W, COUNT, FRESH, SEE>(codes, scales, sums + i, CHUNK, &seen);
        } else {
            add_chunk<V, W, COUNT, FRESH, SEE>(codes, scales, sums + i, size - i, &seen);
        }
        if (SEE) seen.end(extremes->high + i / CHUNK, extremes->low + i / CHUNK);
    }
}

template <class V, Width W, int COUNT, bool SEE>
static void sum_tile_of(const Coded* terms, bool fresh, float* sums, int64_t size,
                        Extremes* extremes) {
    if (fresh) return sum_terms<V, W, COUNT, true, SEE>(terms, sums, size, extremes);
    sum_terms<V, W, COUNT, false, SEE>(terms, sums, size, extremes);
}

template <class V, Width W, bool SEE>
static void sum_some(const Coded* terms, int count, bool fresh, float* sums, int64_t size,
                     Extremes* extremes) {
    if (count == 8) return sum_tile_of<V, W, 8, SEE>(terms, fresh, sums, size, extremes);
    if (count > 4) {
        sum_tile_of<V, W, 4, false>(terms, fresh, sums, size, nullptr);
        return sum_some<V, W, SEE>(terms + 4, count - 4, false, sums, size, extremes);
    }
    if (count == 4) return sum_tile_of<V, W, 4, SEE>(terms, fresh, sums, size, extremes);
    if (count == 3) return sum_tile_of<V, W, 3, SEE>(terms, fresh, sums, size, extremes);
    if (count == 2) return sum_tile_of<V, W, 2, SEE>(terms, fresh, sums, size, extremes);
    sum_tile_of<V, W, 1, SEE>(terms, fresh, sums, size, extremes);
}

template <class V, Width W>
static void sum_tile(const Coded* terms, int count, bool fresh, float* sums, int64_t size,
                     Extremes* extremes) {
    if (extremes == nullptr) {
        return sum_some<V, W, false>(terms, count, fresh, sums, size, nullptr);
    }
    for (int64_t i = 0; i < TILE / CHUNK; ++i) {
        extremes->high[i] = 0x80000000u;  // the least signed word, and the least unsigned one
        extremes->low[i] = 0;
    }
    sum_some<V, W, true>(terms, count, fresh, sums, size, extremes);
}

template <class V, Type T>
static void sum_raw_tile(const void* from, float* sums, int64_t size) {
    float values[TILE];
    convert_tile<V, T, FP32>(from, values, size);
    for (int64_t i = 0; i < size; ++i) sums[i] += values[i];
}

template <class V> static const Kernels* kernels_of() {
    static const Kernels table = {
        {{quantize_tile<V, BF16, INT8>, quantize_tile<V, BF16, INT4>},
         {quantize_tile<V, FP16, INT8>, quantize_tile<V, FP16, INT4>},
         {quantize_tile<V, FP32, INT8>, quantize_tile<V, FP32, INT4>}},
        {{dequantize_tile<V, BF16, INT8>, dequantize_tile<V, FP16, INT8>,
          dequantize_tile<V, FP32, INT8>},
         {dequantize_tile<V, BF16, INT4>, dequantize_tile<V, FP16, INT4>,
          dequantize_tile<V, FP32, INT4>}},
        {{convert_tile<V, BF16, BF16>, convert_tile<V, BF16, FP16>, convert_tile<V, BF16, FP32>},
         {convert_tile<V, FP16, BF16>, convert_tile<V, FP16, FP16>, convert_tile<V, FP16, FP32>},
         {convert_tile<V, FP32, BF16>, convert_tile<V, FP32, FP16>, convert_tile<V, FP32, FP32>}},
        {sum_tile<V, INT8>, sum_tile<V, INT4>},
        {quantize_sum<V, INT8>, quantize_sum<V, INT4>},
        {sum_raw_tile<V, BF16>, sum_raw_tile<V, FP16>, sum_raw_tile<V, FP32>},
        adam_loop,
        draw_loop,
    };
    return &table;
}

}  // namespace zpp
