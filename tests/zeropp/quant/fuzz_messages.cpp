// Calls the functions of csrc/messages/cpu.cpp with any bytes, in memory that ends where it may.
// tests/zeropp/quant/test_rearranged.py compiles it with AddressSanitizer.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <random>
#include <vector>

extern "C" {
int64_t zpp_differences(const uint8_t*, const uint8_t*, int64_t, uint8_t*, uint8_t*);
int64_t zpp_add_differences(const uint8_t*, const uint8_t*, int64_t, int64_t, uint8_t*);
int64_t zpp_spread_threes(const uint8_t*, int64_t, uint8_t*);
int64_t zpp_join_threes(const uint8_t*, int64_t, uint8_t*);
}

int main() {
    std::mt19937 random(0);
    using Bytes = std::vector<uint8_t>;
    const auto some = [&](int64_t size, int top) {
        Bytes bytes(static_cast<size_t>(size));
        for (auto& byte : bytes) byte = uint8_t(random() % unsigned(top));
        return bytes;
    };
    for (int round = 0; round < 100000; ++round) {
        const int64_t quarter = random() % 20;
        const Bytes row = some(4 * quarter, 1 + random() % 256), held = some(4 * quarter, 4);
        Bytes symbols(static_cast<size_t>(quarter)), others(static_cast<size_t>(4 * quarter));
        const int64_t count =
            zpp_differences(row.data(), held.data(), quarter, symbols.data(), others.data());
        others.resize(static_cast<size_t>(count));
        others.shrink_to_fit();
        Bytes arrived = held;
        if (zpp_add_differences(symbols.data(), others.data(), count, quarter, arrived.data()) ||
            arrived != row) {
            fprintf(stderr, "round %d: another row arrived\n", round);
            return 1;
        }
        const Bytes wrong = some(quarter, 256), few = some(random() % 80, 256);
        zpp_add_differences(wrong.data(), few.data(), int64_t(few.size()), quarter, arrived.data());
        const Bytes threes = some(3 * quarter, 256);
        Bytes fours(static_cast<size_t>(4 * quarter)), joined(static_cast<size_t>(3 * quarter));
        zpp_spread_threes(threes.data(), quarter, fours.data());
        zpp_join_threes(fours.data(), quarter, joined.data());
        if (joined != threes) return 1;
        const Bytes any = some(4 * quarter, 256);
        zpp_join_threes(any.data(), quarter, joined.data());
    }
    return 0;
}
