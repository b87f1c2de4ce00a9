// The part of the CUDA driver ABI that a launch needs, declared here so that no CUDA toolkit is needed to build, and
// the table of functions found in libcuda at run time. Values follow the CUDA 12.4 driver API reference.
#ifndef JAXMOE_FFI_DRIVER_H_
#define JAXMOE_FFI_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "ffi/status.h"

namespace jaxmoe::cuda {

using Result = int;  // CUresult; 0 is success
using Device = int;  // CUdevice
using Context = struct ContextOpaque*;
using Stream = struct StreamOpaque*;
using Library = struct LibraryOpaque*;
using Kernel = struct KernelOpaque*;      // bound to no context; stands for a Function in a launch
using Function = struct FunctionOpaque*;  // bound to one context

enum FunctionAttribute : int { kMaxDynamicSharedSizeBytes = 8 };

enum LaunchAttributeId : int { kCooperative = 2, kClusterDimension = 4, kProgrammaticStreamSerialization = 6 };

union LaunchAttributeValue {
  char pad[64];
  int cooperative;
  struct {
    unsigned x, y, z;
  } cluster;
  int programmatic_stream_serialization;
};

struct LaunchAttribute {
  LaunchAttributeId id;
  char pad[8 - sizeof(LaunchAttributeId)];
  LaunchAttributeValue value;
};
static_assert(sizeof(LaunchAttribute) == 72, "CUlaunchAttribute is 72 bytes");

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned dynamic_smem;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56, "CUlaunchConfig is 56 bytes");

enum TensorMapType : int {
  kUint8 = 0,
  kInt32 = 3,
  kFloat32 = 7,
  kBfloat16 = 9,
  kTfloat32 = 11,
  k16U4Align16B = 14,
};
enum TensorMapInterleave : int { kInterleaveNone = 0 };
enum TensorMapSwizzle : int { kSwizzleNone = 0, kSwizzle32B = 1, kSwizzle64B = 2, kSwizzle128B = 3 };
enum TensorMapPromotion : int { kPromotion256B = 3 };
enum TensorMapFill : int { kFillZero = 0 };

struct alignas(128) TensorMap {
  std::uint64_t opaque[16];
};

// Functions of libcuda. Found once per process; every pointer is set when Load() has succeeded.
struct Driver {
  Result (*Init)(unsigned flags);
  Result (*GetErrorName)(Result, const char**);
  Result (*GetErrorString)(Result, const char**);
  Result (*DeviceGet)(Device*, int ordinal);
  Result (*PrimaryContextRetain)(Context*, Device);
  Result (*ContextPush)(Context);
  Result (*ContextPop)(Context*);
  Result (*LibraryLoadData)(Library*, const void* image, const void* jit_options, const void* jit_values,
                            unsigned jit_count, const void* options, const void* values, unsigned count);
  Result (*LibraryUnload)(Library);
  Result (*LibraryGetKernelCount)(unsigned*, Library);
  Result (*LibraryEnumerateKernels)(Kernel*, unsigned count, Library);
  Result (*KernelSetAttribute)(FunctionAttribute, int value, Kernel, Device);
  Result (*KernelGetFunction)(Function*, Kernel);
  Result (*KernelGetParamInfo)(Kernel, std::size_t index, std::size_t* offset, std::size_t* size);
  Result (*TensorMapEncodeTiled)(TensorMap*, TensorMapType, std::uint32_t rank, void* address,
                                 const std::uint64_t* dims, const std::uint64_t* strides, const std::uint32_t* box,
                                 const std::uint32_t* element_strides, TensorMapInterleave, TensorMapSwizzle,
                                 TensorMapPromotion, TensorMapFill);
  Result (*LaunchKernelEx)(const LaunchConfig*, Kernel, void** params, void** extra);

  // Opens libcuda.so.1, or the library that the environment variable JAXMOE_LIBCUDA names. A success is final; a
  // failure is tried again by the next call.
  static Status Load(const Driver** driver);

  // "cuLaunchKernelEx failed: CUDA_ERROR_INVALID_VALUE (invalid argument)".
  std::string Describe(const char* call, Result result) const;
};

}  // namespace jaxmoe::cuda

#endif  // JAXMOE_FFI_DRIVER_H_
