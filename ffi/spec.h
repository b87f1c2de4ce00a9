// A list of kernel launches, decoded from the bytes that jaxmoe/cuda/launch.py writes.
#ifndef JAXMOE_FFI_SPEC_H_
#define JAXMOE_FFI_SPEC_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "ffi/context.h"
#include "ffi/driver.h"
#include "ffi/status.h"

namespace jaxmoe {

// Limits that keep everything a launch needs on the stack.
inline constexpr std::size_t kMaxBuffers = 64;      // arguments, and results, of one custom call
inline constexpr std::size_t kMaxParams = 64;       // parameters of one kernel
inline constexpr std::size_t kMaxTensorMaps = 16;   // of one kernel
inline constexpr std::size_t kMaxStructBytes = 1024;  // of all by-value structs of one kernel

// Bytes [offset, offset + extent) of an argument or a result.
struct BufferRef {
  bool is_result;
  std::uint32_t index;
  std::uint64_t offset;
  std::uint64_t extent;
};

struct NullParam {};

struct PointerParam {
  BufferRef buffer;
};

struct IntegerParam {
  std::uint64_t value;  // little endian: a narrower integer is its first bytes
  std::uint8_t width;
};

struct PeerParam {
  std::uint32_t context;
  PeerField field;
};

struct StructParam {
  struct Patch {
    std::size_t offset;
    PeerParam peer;
  };
  std::vector<unsigned char> bytes;
  std::vector<Patch> patches;
  std::size_t scratch;  // where the patched copy lies among the structs of the launch
};

struct TensorMapParam {
  BufferRef buffer;
  std::uint32_t alignment;  // of the first byte
  cuda::TensorMapType type;
  cuda::TensorMapSwizzle swizzle;
  std::uint32_t rank;
  std::uint64_t dims[5];
  std::uint64_t strides[4];
  std::uint32_t box[5];
};

using Param = std::variant<NullParam, PointerParam, IntegerParam, StructParam, PeerParam, TensorMapParam>;

struct LaunchSpec {
  std::string cubin;
  std::string name;
  std::uint32_t grid[3];
  std::uint32_t block[3];
  std::uint32_t dynamic_smem;
  std::uint32_t cluster;
  bool cooperative;
  bool pdl;
  std::vector<Param> params;
};

struct CallSpec {
  std::string target;
  std::vector<LaunchSpec> launches;
};

// Reads `size` bytes and never more, whatever they hold.
Status Decode(const unsigned char* data, std::size_t size, CallSpec* spec);

}  // namespace jaxmoe

#endif  // JAXMOE_FFI_SPEC_H_
