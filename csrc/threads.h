// Work on several threads.
//
// One thread is no machinery at all. More are started for the call and joined at its end, so that
// nothing is left behind that a fork could break or that would compete with PyTorch's own threads.
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

// body(0), ..., body(count - 1), side by side; the first on this thread.
template <class Body> void on_threads(int64_t count, const Body& body) {
    std::vector<std::thread> started;
    started.reserve(size_t(count));
    for (int64_t part = 1; part < count; ++part) {
        try {
            started.emplace_back([&body, part] { body(part); });
        } catch (const std::system_error&) {  // no thread to be had: its part is done here
            body(part);
        }
    }
    body(0);
    for (auto& thread : started) thread.join();
}

}  // namespace zpp
