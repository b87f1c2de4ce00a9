// Zeroes the rows that a grouped GEMM does not write, or that hold what no expert computed. A column of blocks per group.

// alignment 0: out is [groups, rows], and a group with group[g] = 0 is zeroed. Else out is [rows] of the psum layout,
// where group[g] is the end of group g, and the rows up to the next group, or the end, are. quads: 16-byte words of a row.
__global__ void __launch_bounds__(256) jaxmoe_zero_rows(const int* __restrict__ group, uint4* __restrict__ out,
                                                        int groups, int alignment, int rows, int quads) {
    const int g = blockIdx.x;
    long long begin = (long long)g * rows, end = begin;
    if (alignment == 0) {
        if (group[g] == 0) end += rows;
    } else {
        begin = min(group[g], rows);
        end = g == groups - 1 ? rows : min((group[g] + alignment - 1) / alignment * alignment, rows);
    }
    const long long step = (long long)gridDim.y * blockDim.x;
    for (long long i = begin * quads + (long long)blockIdx.y * blockDim.x + threadIdx.x; i < end * quads; i += step)
        out[i] = make_uint4(0, 0, 0, 0);
}
