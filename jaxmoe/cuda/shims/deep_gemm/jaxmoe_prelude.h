// Included ahead of every kernel source. The CUDA runtime's device functions are not declared under NVRTC;
// the kernels call this one, which is a single PTX instruction.
#pragma once

#if defined(__CUDACC_RTC__)
__device__ __forceinline__ void cudaGridDependencySynchronize() {
    asm volatile("griddepcontrol.wait;" : : : "memory");
}
#endif
