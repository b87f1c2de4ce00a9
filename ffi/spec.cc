#include "ffi/spec.h"

#include <cstring>
#include <limits>

namespace jaxmoe {
namespace {

constexpr char kMagic[4] = {'J', 'X', 'M', 'L'};
constexpr std::uint16_t kVersion = 1;
constexpr std::size_t kMaxNameBytes = 256;
constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 62;

enum Tag : std::uint8_t { kNull, kPointer, kInteger, kStruct, kPeer, kTensorMap };

struct TypeInfo {
  cuda::TensorMapType type;
  std::uint32_t bits;
  std::uint32_t alignment;
};

// By position in the TENSOR_MAP_DTYPES of launch.py.
constexpr TypeInfo kTypes[] = {
    {cuda::kUint8, 8, 16},     {cuda::kBfloat16, 16, 16}, {cuda::kFloat32, 32, 16},
    {cuda::kTfloat32, 32, 16}, {cuda::kInt32, 32, 16},    {cuda::k16U4Align16B, 4, 32},
};

// Reads little-endian values. After the first failure every read gives zero and `failure` says what was wrong where.
class Reader {
 public:
  Reader(const unsigned char* data, std::size_t size) : data_(data), size_(size) {}

  bool failed() const { return !failure_.empty(); }
  const std::string& failure() const { return failure_; }
  std::size_t left() const { return size_ - at_; }

  void Fail(const std::string& what) {
    if (!failed()) failure_ = what + " at byte " + std::to_string(at_) + " of " + std::to_string(size_);
  }

  const unsigned char* Bytes(std::size_t count) {
    if (failed()) return nullptr;
    if (count > left()) {
      Fail("cut short: " + std::to_string(count) + " more bytes expected");
      return nullptr;
    }
    const unsigned char* bytes = data_ + at_;
    at_ += count;
    return bytes;
  }

  template <typename T>
  T Number() {
    const unsigned char* bytes = Bytes(sizeof(T));
    std::uint64_t value = 0;
    for (std::size_t i = 0; bytes != nullptr && i < sizeof(T); ++i) value |= std::uint64_t{bytes[i]} << (8 * i);
    return static_cast<T>(value);
  }

  template <typename T>
  T NumberIn(T low, T high, const char* what) {
    T value = Number<T>();
    if (!failed() && (value < low || value > high)) {
      Fail(std::string(what) + " " + std::to_string(value) + " is outside " + std::to_string(low) + ".." +
           std::to_string(high));
    }
    return failed() ? low : value;
  }

  std::string Text(const char* what) {
    std::size_t count = Number<std::uint16_t>();
    if (!failed() && (count == 0 || count > kMaxNameBytes)) Fail(std::string(what) + " has a bad length");
    const unsigned char* bytes = Bytes(count);
    if (bytes == nullptr) return {};
    std::string text(reinterpret_cast<const char*>(bytes), count);
    for (char c : text) {
      if (c < 0x20 || c > 0x7e) Fail(std::string(what) + " holds a character outside printable ASCII");
    }
    return failed() ? std::string() : text;
  }

 private:
  const unsigned char* data_;
  std::size_t size_;
  std::size_t at_ = 0;
  std::string failure_;
};

BufferRef ReadBuffer(Reader& in) {
  BufferRef buffer{};
  buffer.is_result = in.NumberIn<std::uint8_t>(0, 1, "buffer kind") == 1;
  buffer.index = in.NumberIn<std::uint32_t>(0, kMaxBuffers - 1, "buffer index");
  buffer.offset = in.NumberIn<std::uint64_t>(0, kMaxBytes, "buffer offset");
  return buffer;
}

PeerParam ReadPeer(Reader& in) {
  PeerParam peer{};
  peer.context = in.Number<std::uint32_t>();
  peer.field = static_cast<PeerField>(in.NumberIn<std::uint8_t>(0, kPeerFields - 1, "peer field"));
  return peer;
}

StructParam ReadStruct(Reader& in, std::size_t* struct_bytes) {
  StructParam param{};
  std::size_t count = in.NumberIn<std::uint16_t>(1, kMaxStructBytes, "struct size");
  if (const unsigned char* bytes = in.Bytes(count); bytes != nullptr) param.bytes.assign(bytes, bytes + count);
  param.scratch = *struct_bytes;
  *struct_bytes += (count + 15) / 16 * 16;
  if (*struct_bytes > kMaxStructBytes) in.Fail("the structs of one kernel are larger than 1024 bytes");
  std::size_t patches = in.Number<std::uint8_t>();
  for (std::size_t i = 0; i < patches && !in.failed(); ++i) {
    StructParam::Patch patch{in.Number<std::uint16_t>(), ReadPeer(in)};
    if (!in.failed() && patch.offset + PeerFieldBytes(patch.peer.field) > param.bytes.size()) {
      in.Fail("a peer field lies outside its struct");
    }
    param.patches.push_back(patch);
  }
  return param;
}

// Bytes from the first element to the end of the last; 0 when that overflows.
std::uint64_t Extent(const TensorMapParam& map, std::uint32_t bits) {
  std::uint64_t bytes = (map.dims[0] * bits + 7) / 8;
  for (std::uint32_t i = 1; i < map.rank; ++i) {
    std::uint64_t step = 0;
    if (__builtin_mul_overflow(map.dims[i] - 1, map.strides[i - 1], &step) ||
        __builtin_add_overflow(bytes, step, &bytes)) {
      return 0;
    }
  }
  return bytes > kMaxBytes ? 0 : bytes;
}

TensorMapParam ReadTensorMap(Reader& in) {
  TensorMapParam map{};
  map.buffer = ReadBuffer(in);
  const TypeInfo& type = kTypes[in.NumberIn<std::uint8_t>(0, std::size(kTypes) - 1, "element type")];
  map.type = type.type;
  map.alignment = type.alignment;
  map.swizzle = static_cast<cuda::TensorMapSwizzle>(in.NumberIn<std::uint8_t>(0, cuda::kSwizzle128B, "swizzle"));
  map.rank = in.NumberIn<std::uint8_t>(1, 5, "rank");
  for (std::uint32_t i = 0; i < map.rank; ++i) {
    map.dims[i] = in.NumberIn<std::uint64_t>(1, std::uint64_t{1} << 32, "dimension");
  }
  for (std::uint32_t i = 0; i + 1 < map.rank; ++i) {
    map.strides[i] = in.NumberIn<std::uint64_t>(0, (std::uint64_t{1} << 40) - 1, "stride");
  }
  for (std::uint32_t i = 0; i < map.rank; ++i) map.box[i] = in.NumberIn<std::uint32_t>(1, 256, "box");
  map.buffer.extent = Extent(map, type.bits);
  if (!in.failed() && map.buffer.extent == 0) in.Fail("a tensor map spans too many bytes");
  return map;
}

Param ReadParam(Reader& in, std::size_t* struct_bytes) {
  switch (in.NumberIn<std::uint8_t>(kNull, kTensorMap, "parameter kind")) {
    case kPointer: {
      PointerParam pointer{ReadBuffer(in)};
      pointer.buffer.extent = in.NumberIn<std::uint64_t>(0, kMaxBytes, "pointer extent");
      return pointer;
    }
    case kInteger: {
      IntegerParam integer{};
      integer.width = in.NumberIn<std::uint8_t>(1, 8, "integer width");
      integer.value = in.Number<std::uint64_t>();
      return integer;
    }
    case kStruct:
      return ReadStruct(in, struct_bytes);
    case kPeer:
      return ReadPeer(in);
    case kTensorMap:
      return ReadTensorMap(in);
    default:
      return NullParam{};
  }
}

LaunchSpec ReadLaunch(Reader& in) {
  LaunchSpec launch{};
  launch.cubin = in.Text("cubin key");
  // The key becomes a file name.
  if (launch.cubin.find('/') != std::string::npos || (!launch.cubin.empty() && launch.cubin[0] == '.')) {
    in.Fail("the cubin key '" + launch.cubin + "' is not a plain file name");
  }
  launch.name = in.Text("kernel name");
  for (auto& extent : launch.grid) extent = in.NumberIn<std::uint32_t>(1, 0x7fffffff, "grid");
  for (auto& extent : launch.block) extent = in.NumberIn<std::uint32_t>(1, 1024, "block");
  launch.dynamic_smem = in.NumberIn<std::uint32_t>(0, 1 << 20, "dynamic shared memory");
  launch.cluster = in.NumberIn<std::uint32_t>(1, 16, "cluster");
  launch.cooperative = in.NumberIn<std::uint8_t>(0, 1, "cooperative") == 1;
  launch.pdl = in.NumberIn<std::uint8_t>(0, 1, "pdl") == 1;
  std::size_t count = in.NumberIn<std::uint16_t>(0, kMaxParams, "parameter count");
  std::size_t struct_bytes = 0;
  std::size_t tensor_maps = 0;
  for (std::size_t i = 0; i < count && !in.failed(); ++i) {
    launch.params.push_back(ReadParam(in, &struct_bytes));
    tensor_maps += std::holds_alternative<TensorMapParam>(launch.params.back());
  }
  if (tensor_maps > kMaxTensorMaps) in.Fail("more than 16 tensor maps in one kernel");
  return launch;
}

}  // namespace

Status Decode(const unsigned char* data, std::size_t size, CallSpec* spec) {
  Reader in(data, size);
  const unsigned char* magic = in.Bytes(sizeof(kMagic));
  if (magic != nullptr && std::memcmp(magic, kMagic, sizeof(kMagic)) != 0) in.Fail("the magic is not JXML");
  std::uint16_t version = in.Number<std::uint16_t>();
  if (!in.failed() && version != kVersion) {
    in.Fail("version " + std::to_string(version) + " instead of " + std::to_string(kVersion) +
            " (the Python package and libjaxmoe_ffi.so are of different builds: reinstall)");
  }
  spec->target = in.Text("target name");
  std::size_t launches = in.Number<std::uint16_t>();
  for (std::size_t i = 0; i < launches && !in.failed(); ++i) spec->launches.push_back(ReadLaunch(in));
  if (!in.failed() && in.left() != 0) in.Fail("unread bytes follow the last launch");
  if (in.failed()) return InvalidArgument("jaxmoe: malformed launch specification: " + in.failure());
  return {};
}

}  // namespace jaxmoe
