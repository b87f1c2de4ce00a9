// Which row of the grouped buffer each choice takes. One block per expert reads all choices in order, so that places
// never depend on timing; it owns the expert's rows, and the slots of the choices that take them.

// Layouts: psum, contiguous, masked; see jaxmoe/ops/rows.py.
enum Layout { kPsum, kContiguous, kMasked };

// ids, slots: [tokens, choices]. group: [experts], contiguous [rows]. source: [rows]. capacity: rows of each expert,
// masked. The grid has a block per expert, a block whole warps, at most 32. Shared memory: an int per expert.
__global__ void jaxmoe_group_tokens(const int* __restrict__ ids, int* __restrict__ group, int* __restrict__ slots,
                                    int* __restrict__ source, int tokens, int choices, int experts, int layout,
                                    int alignment, int capacity, int rows) {
    extern __shared__ int counts[];
    __shared__ int of_warp[32];
    const int expert = blockIdx.x, total = tokens * choices;
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
    const int length = (total + 32 * warps - 1) / (32 * warps) * 32;
    const int begin = min(warp * length, total), end = min(begin + length, total);

    for (int e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();

    // A choice takes a row of this expert, unless it is masked and an earlier choice of its token has taken one.
    auto takes = [&](int i, int id) {
        if (id != expert) return false;
        if (layout == kMasked)
            for (int j = i - i % choices; j < i; ++j)
                if (ids[j] == expert) return false;
        return true;
    };

    // How many choices of each warp's part are this expert's, and how many all earlier experts have.
    int mine = 0;
    #pragma unroll 4
    for (int base = begin; base < end; base += 32) {
        const int i = base + lane;
        const int id = i < end ? ids[i] : -1;
        if (layout != kMasked && 0 <= id && id < expert) atomicAdd(&counts[id], 1);
        mine += __popc(__ballot_sync(0xffffffffu, takes(i, id)));
    }
    if (lane == 0) of_warp[warp] = mine;
    __syncthreads();

    int count = 0, rank = 0;
    for (int w = 0; w < warps; ++w) {
        if (w == warp) rank = count;
        count += of_warp[w];
    }
    // Rows of the experts before this one, each rounded up; every warp adds up all of them.
    int start = 0;
    if (layout == kMasked) {
        start = expert * capacity;
    } else {
        for (int e = lane; e < expert; e += 32) start += (counts[e] + alignment - 1) / alignment * alignment;
        start = __reduce_add_sync(0xffffffffu, start);
    }

    #pragma unroll 4
    for (int base = begin; base < end; base += 32) {
        const int i = base + lane;
        const int id = i < end ? ids[i] : -1;
        const bool taking = takes(i, id);
        const unsigned takers = __ballot_sync(0xffffffffu, taking);
        if (taking) {
            const int row = start + rank + __popc(takers & ((1u << lane) - 1));
            slots[i] = row;
            source[row] = i / choices;
            if (layout == kContiguous) group[row] = expert;
            if (layout == kMasked)
                for (int j = i + 1; j % choices; ++j)
                    if (ids[j] == expert) slots[j] = row;
        }
        if (expert == 0 && i < end && !(0 <= id && id < experts)) slots[i] = -1;
        rank += __popc(takers);
    }

    // Rows up to the next expert's, or the buffer's end, are padding.
    int last = layout == kMasked ? start + capacity : start + (count + alignment - 1) / alignment * alignment;
    if (expert == experts - 1) last = rows;
    for (int row = start + count + threadIdx.x; row < last; row += blockDim.x) {
        source[row] = -1;
        if (layout == kContiguous) group[row] = -1;
    }
    if (threadIdx.x == 0 && layout != kContiguous) group[expert] = layout == kMasked ? count : start + count;
}
