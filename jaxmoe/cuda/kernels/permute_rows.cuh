// Quantised rows and their scales into the grouped buffer. Nothing is shared between blocks, so no order matters.
//
// Rows are pushed: each is read once and written at every slot of its token. Scales are pulled: their words lie in the
// order of tokens, so that a word pushed to its place touches 32 bytes there, whereas rows that pull, four a thread,
// write whole lines and read at random from shared memory.

// Tokens of the rows column .. column + 3, -1 for none and past the end. at: of the first in source.
__device__ __forceinline__ int4 four_sources(const int* source, long long at, int column, int rows) {
    if (at % 4 == 0 && column + 4 <= rows) return *reinterpret_cast<const int4*>(source + at);
    int4 found;
    found.x = column < rows ? source[at] : -1;
    found.y = column + 1 < rows ? source[at + 1] : -1;
    found.z = column + 2 < rows ? source[at + 2] : -1;
    found.w = column + 3 < rows ? source[at + 3] : -1;
    return found;
}

// Words first .. first + count - 1 of the scales of four rows after another. table: those words of all tokens.
__device__ __forceinline__ void pull(const unsigned* table, unsigned long long* arrived,
                                     const int* __restrict__ source, unsigned* __restrict__ out_scales, int first,
                                     int count, int begin, int end, int words, int stride, int leads, int rows,
                                     int out_stride, int through, unsigned neutral) {
    const int quads = out_stride / 4;
    const auto lead_of = [&](int i) { return leads == 1 ? 0 : i / quads; };
    const auto sources = [&](int i) {
        const int lead = lead_of(i), column = 4 * (i - lead * quads);
        return four_sources(source, static_cast<long long>(lead) * rows + column, column, rows);
    };
    int i = begin + threadIdx.x;
    int4 next = {-1, -1, -1, -1};
    if (i < end) next = sources(i);
    if (arrived) await(arrived);
    for (; i < end; i += blockDim.x) {
        const int4 token = next;
        if (i + blockDim.x < end) next = sources(i + blockDim.x);
        const int lead = lead_of(i);
        const unsigned* row = table;
        unsigned* to = out_scales + (static_cast<long long>(lead) * words + first) * out_stride + 4 * (i - lead * quads);
        for (int w = 0; w < count; ++w, row += stride, to += out_stride) {
            uint4 scale;
            scale.x = token.x < 0 ? neutral : row[token.x];
            scale.y = token.y < 0 ? neutral : row[token.y];
            scale.z = token.z < 0 ? neutral : row[token.z];
            scale.w = token.w < 0 ? neutral : row[token.w];
            if (through) __stcs(reinterpret_cast<uint4*>(to), scale);
            else *reinterpret_cast<uint4*>(to) = scale;
        }
    }
}

// x: [tokens, row_bytes], a multiple of 16. scales: [words, stride]. slots: [tokens, choices]. source: [leads, rows].
// out: [leads, rows, row_bytes]. out_scales: [leads, words, out_stride], a multiple of 4. The last `pulling` blocks
// move scales, while stores of the others' drain: `group` words of `chunk` times four rows each, from shared memory
// where `shared` says so, for which stride is a multiple of 4. The others move `staged` tokens each, at most one a
// warp, through shared memory. Where `through` says so, what is written is the first to leave the L2 cache.
__global__ void __launch_bounds__(256, 6) jaxmoe_permute_rows(const char* __restrict__ x, const unsigned* __restrict__ scales,
                                    const int* __restrict__ slots, const int* __restrict__ source,
                                    char* __restrict__ out, unsigned* __restrict__ out_scales, int tokens, int choices,
                                    int row_bytes, int words, int stride, int leads, int rows, int out_stride,
                                    int staged, int pulling, int group, int chunk, int shared, int through,
                                    unsigned neutral) {
    extern __shared__ __align__(128) char stage[];
    __shared__ unsigned long long arrived[32];
    const int pull_block = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x) + pulling;
    if (pull_block >= 0) {
        const int groups = (words + group - 1) / group, first = pull_block % groups * group;
        const int count = min(group, words - first), begin = pull_block / groups * chunk;
        const int end = min(begin + chunk, leads * (out_stride / 4));
        const unsigned* table = scales + static_cast<long long>(first) * stride;
        if (shared) {
            if (threadIdx.x == 0) fetch(stage, table, 4u * count * stride, arrived);
            __syncthreads();
            pull(reinterpret_cast<const unsigned*>(stage), arrived, source, out_scales, first, count, begin, end,
                 words, stride, leads, rows, out_stride, through, neutral);
        } else {
            pull(table, nullptr, source, out_scales, first, count, begin, end, words, stride, leads, rows, out_stride,
                 through, neutral);
        }
        return;
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int token = blockIdx.x * staged + warp;
    if (warp >= staged || token >= tokens) return;
    const int* mine = slots + static_cast<long long>(token) * choices;
    bool wanted = false;
    for (int k = lane; k < choices; k += 32) wanted |= mine[k] >= 0;
    if (!__any_sync(0xFFFFFFFF, wanted)) return;
    char* row = stage + warp * row_bytes;
    if (lane == 0) fetch(row, x + static_cast<long long>(token) * row_bytes, row_bytes, &arrived[warp]);
    __syncwarp();
    await(&arrived[warp]);
    for (int k = lane; k < choices; k += 32)
        if (mine[k] >= 0) {
            char* to = out + static_cast<long long>(mine[k]) * row_bytes;
            through ? store_through(to, row, row_bytes) : store(to, row, row_bytes);
        }
    await_stores();
}
