// Work on several threads.
//
// With one thread nothing is started. More are started for a call and joined at its end, so that
// none is left that a fork could break or that would compete with PyTorch's own threads.
#pragma once

#include <stdint.h>

#include <system_error>
#include <thread>
#include <vector>

namespace zpp {

constexpr int64_t BYTES_PER_THREAD = 1 << 20;  // with fewer, starting one takes longer than it saves

static inline int64_t useful_threads(int64_t threads, int64_t bytes) {
    const int64_t useful = bytes / BYTES_PER_THREAD;
    const int64_t count = threads < useful ? threads : useful;
    return count < 1 ? 1 : count;
}

// Run body(0), ..., body(count - 1) concurrently, the first on the calling thread.
template <class Body> void on_threads(int64_t count, const Body& body) {
    std::vector<std::thread> threads;
    threads.reserve(size_t(count));
    for (int64_t part = 1; part < count; ++part) {
        try {
            threads.emplace_back([&body, part] { body(part); });
        } catch (const std::system_error&) {  // no more threads: this part runs here
            body(part);
        }
    }
    body(0);
    for (auto& thread : threads) thread.join();
}

}  // namespace zpp
