// Loops over the sample index that NumPy has no function for; each reads and writes its arrays once.
// megatron_zpp/data/compiled_index.py calls them through a plain C interface.

#include <cstdint>
#include <limits>
#include <vector>

namespace {

constexpr int kMaxUnrolled = 16;  // datasets of a blend
constexpr int kAhead = 64;        // elements to prefetch

// Matsumoto and Nishimura 1998, with the state that NumPy's RandomState.get_state() returns.
class Twister {
 public:
  Twister(uint32_t* key, int32_t* position) : key_(key), position_(position) {}

  uint32_t next() {
    if (*position_ >= kSize) refill();
    uint32_t y = key_[(*position_)++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
  }

 private:
  static constexpr int kSize = 624, kShift = 397;

  static uint32_t mix(uint32_t high, uint32_t low) {
    const uint32_t y = (high & 0x80000000u) | (low & 0x7fffffffu);
    return (y >> 1) ^ ((low & 1) ? 0x9908b0dfu : 0u);
  }

  void refill() {
    int i = 0;
    for (; i < kSize - kShift; ++i) key_[i] = key_[i + kShift] ^ mix(key_[i], key_[i + 1]);
    for (; i < kSize - 1; ++i) key_[i] = key_[i + kShift - kSize] ^ mix(key_[i], key_[i + 1]);
    key_[i] = key_[kShift - 1] ^ mix(key_[i], key_[0]);
    *position_ = 0;
  }

  uint32_t* key_;
  int32_t* position_;
};

// Fisher-Yates from the end, each partner drawn by masked rejection, as in RandomState.shuffle.
// Draws do not depend on the data, so a block of partners is drawn ahead and their memory prefetched.
void shuffle(uint32_t* data, int64_t count, Twister& twister) {
  uint32_t partners[kAhead];
  for (int64_t top = count - 1; top > 0;) {
    const int block = static_cast<int>(top < kAhead ? top : kAhead);
    for (int k = 0; k < block;) {
      const uint32_t limit = static_cast<uint32_t>(top - k);
      const uint32_t mask = ~0u >> __builtin_clz(limit);
      const uint32_t drawn = twister.next() & mask;
      partners[k] = drawn;
      if (drawn <= limit) {
        __builtin_prefetch(data + drawn, 1);
        ++k;
      }
    }
    for (int k = 0; k < block; ++k, --top) {
      const uint32_t swapped = data[top];
      data[top] = data[partners[k]];
      data[partners[k]] = swapped;
    }
  }
}

// Rows (index into `documents`, token in that document) of every seq_length-th token, in order.
template <typename T>
void starts(const int32_t* lengths, const int32_t* documents, int64_t num_documents,
            int64_t seq_length, int64_t rows, T* out) {
  int64_t begin = 0, target = seq_length, row = 1;
  out[0] = out[1] = 0;
  for (int64_t i = 0; i < num_documents && row < rows; ++i) {
    if (i + kAhead < num_documents) __builtin_prefetch(lengths + documents[i + kAhead]);
    const int64_t end = begin + lengths[documents[i]];
    for (; target < end && row < rows; target += seq_length, ++row) {
      out[2 * row] = static_cast<T>(i);
      out[2 * row + 1] = static_cast<T>(target - begin);
    }
    begin = end;
  }
}

// Sample k is from the dataset with the largest shares * max(k, 1) - taken; the first one wins a tie.
// The choices are nearly periodic and processors predict them: a branch is five times faster than a
// conditional move. With kDatasets > 0 the loop over datasets is unrolled, which is five times faster
// again.
template <bool kLimited, int64_t kDatasets>
void blend(const double* shares, const int64_t* limits, int64_t num_datasets, int64_t size,
           int16_t* dataset, int64_t* sample) {
  const int64_t n = kDatasets ? kDatasets : num_datasets;
  std::vector<double> taken(n, 0.0);
  double* counts = taken.data();
  for (int64_t k = 0; k < size; ++k) {
    const double position = k ? static_cast<double>(k) : 1.0;
    int64_t pick = 0;
    double furthest = -std::numeric_limits<double>::infinity();
    for (int64_t i = 0; i < n; ++i) {
      const double behind = shares[i] * position - counts[i];
      if (kLimited && counts[i] >= static_cast<double>(limits[i])) continue;
      if (behind > furthest) {
        furthest = behind;
        pick = i;
      }
    }
    dataset[k] = static_cast<int16_t>(pick);
    sample[k] = static_cast<int64_t>(counts[pick]);
    counts[pick] += 1.0;
  }
}

// The blend for `n` datasets: unrolled up to kMaxUnrolled of them.
template <bool kLimited, int64_t kDatasets = 1>
auto blend_of(int64_t n) {
  if constexpr (kDatasets > kMaxUnrolled) {
    return &blend<kLimited, 0>;
  } else {
    return n == kDatasets ? &blend<kLimited, kDatasets> : blend_of<kLimited, kDatasets + 1>(n);
  }
}

}  // namespace

extern "C" {

// data uint32 [count] in place; key uint32 [624] and position move on as RandomState's would.
void zpp_index_shuffle(uint32_t* data, int64_t count, uint32_t* key, int32_t* position) {
  Twister twister(key, position);
  shuffle(data, count, twister);
}

// out [rows, 2] of int32, or of int64 if `wide`.
void zpp_index_starts(const int32_t* lengths, const int32_t* documents, int64_t num_documents,
                      int64_t seq_length, int64_t rows, void* out, int64_t wide) {
  if (wide) {
    starts(lengths, documents, num_documents, seq_length, rows, static_cast<int64_t*>(out));
  } else {
    starts(lengths, documents, num_documents, seq_length, rows, static_cast<int32_t*>(out));
  }
}

// shares [n] add up to 1; dataset int16 [size], sample int64 [size]. With `limits` [n] a dataset
// taken so often drops out; their sum must be at least `size`.
void zpp_index_blend(const double* shares, const int64_t* limits, int64_t n, int64_t size,
                     int16_t* dataset, int64_t* sample) {
  const auto run = limits ? blend_of<true>(n) : blend_of<false>(n);
  run(shares, limits, n, size, dataset, sample);
}

}  // extern "C"
