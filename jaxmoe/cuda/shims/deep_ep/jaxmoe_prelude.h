// Included ahead of every DeepEP kernel source. The kernels' constant expressions hold a `throw` that no instantiation
// reaches and that device-only compilation rejects; tokens choose experts by 32-bit ids; and the two PDL functions of
// the CUDA runtime, which NVRTC does not declare, are one PTX instruction each.
#pragma once

#define throw (void)
#define EP_NUM_TOPK_IDX_BITS 32
#pragma nv_diag_suppress 3012

__device__ __forceinline__ void cudaGridDependencySynchronize() { asm volatile("griddepcontrol.wait;" : : : "memory"); }
__device__ __forceinline__ void cudaTriggerProgrammaticLaunchCompletion() {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}
