// Where the parts of a message of code steps are. zeropp/quant/code_steps.py defines and computes it;
// here its numbers are only read.
#pragma once

#include "../quantize/packed_row.h"

namespace zpp {

constexpr int64_t STEP_TILE = 3840;  // elements whose steps are packed together: 15 blocks
constexpr int64_t COUNTS = 8;        // int32 at the beginning of a message

ZPP_HD constexpr int planes_of(int64_t reach) { return reach == 2 ? 24 : 5; }
ZPP_HD constexpr int lane_bytes_of(int64_t reach) { return reach == 2 ? 7 : reach == 4 ? 2 : 1; }

// The place of a segment in a message, in bytes.
struct StepSegment {
    int64_t scales_at, data_at;
};

// `StepLayout.table` as it is in memory: a row's layout, then this header, then the places.
struct StepLayout {
    int64_t num_bytes, reach;

    static const StepLayout& after(const Layout& rows) {
        return *reinterpret_cast<const StepLayout*>(rows.segments() + rows.count);
    }
    const StepSegment* segments() const { return reinterpret_cast<const StepSegment*>(this + 1); }
    int64_t planes() const { return planes_of(reach); }
    int64_t lane_bytes() const { return lane_bytes_of(reach); }
    int64_t lanes(int64_t elements) const { return (elements + planes() - 1) / planes(); }
    int64_t bytes(int64_t elements) const {
        return elements / STEP_TILE * (STEP_TILE / planes()) * lane_bytes() +
               lanes(elements % STEP_TILE) * lane_bytes();
    }
};

}  // namespace zpp
