// Conversion of arrays between element types, for any vector type V (vector_*.h).
//
// V has WIDTH, F (a vector of WIDTH floats), all, mul and add_product, and load and store of a unit
// (four vectors) of each element type. The remainder of an array goes through a zeroed buffer of one
// unit.
#pragma once

#include "numbers.h"

namespace zpp {

template <class V> constexpr int64_t UNIT = 4 * V::WIDTH;

using Convert = void (*)(const void* from, void* to, int64_t size);

struct Conversions {
    Convert from_to[NUM_TYPES][NUM_TYPES];
};

template <class V, Type FROM, Type TO>
static void convert(const void* from, void* to, int64_t size) {
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

template <class V> constexpr Conversions conversions() {
    return {{{convert<V, BF16, BF16>, convert<V, BF16, FP16>, convert<V, BF16, FP32>},
             {convert<V, FP16, BF16>, convert<V, FP16, FP16>, convert<V, FP16, FP32>},
             {convert<V, FP32, BF16>, convert<V, FP32, FP16>, convert<V, FP32, FP32>}}};
}

}  // namespace zpp
