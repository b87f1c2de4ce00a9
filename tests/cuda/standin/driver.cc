// A CUDA driver that records instead of executing. It exports what libjaxmoe_ffi.so looks up in libcuda, and standin_*
// calls for the tests. An image is text ending in a zero byte:
//     kernels N                 how many kernels the library holds
//     params S S S ...          their parameter sizes in bytes
//     store P BYTE COUNT        a launch writes COUNT times BYTE to where pointer parameter P points
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

struct Library {
  int id;
  unsigned kernels = 0;
  std::vector<std::size_t> params;
  int store_param = -1, store_byte = 0;
  std::size_t store_count = 0;
};

struct Failure {
  int result;
  int after;  // calls that still succeed
};

struct World {
  std::mutex mutex;
#ifdef QUIET
  const bool quiet = true;  // record nothing: for measurements
#else
  const bool quiet = false;
#endif
  int libraries = 0;
  int maps = 0;
  std::string log;
  std::map<std::string, Failure> failures;
};

World& TheWorld() {
  static World* world = new World;
  return *world;
}

thread_local std::vector<int> contexts;

// Writes one JSON object per call.
class Record {
 public:
  explicit Record(const char* call) : text_(std::string("{\"call\": \"") + call + "\"") {}
  template <typename T>
  Record& Number(const char* key, T value) {
    return Text(std::string(", \"") + key + "\": " + std::to_string(static_cast<long long>(value)));
  }
  template <typename T>
  Record& List(const char* key, const T* values, std::size_t count) {
    Text(std::string(", \"") + key + "\": [");
    for (std::size_t i = 0; i < count; ++i) Text((i ? ", " : "") + std::to_string(values[i]));
    return Text("]");
  }
  Record& Text(const std::string& text) {
    text_ += text;
    return *this;
  }
  std::string Line() { return text_ + "}\n"; }

 private:
  std::string text_;
};

// 0, or the result that the test asked `call` to fail with.
int Begin(const char* call) {
  World& world = TheWorld();
  if (world.quiet) return 0;
  std::lock_guard<std::mutex> lock(world.mutex);
  auto found = world.failures.find(call);
  if (found == world.failures.end() || found->second.after-- > 0) return 0;
  return found->second.result;
}

void Log(Record& record) {
  World& world = TheWorld();
  std::lock_guard<std::mutex> lock(world.mutex);
  world.log += record.Line();
}

struct Config {
  unsigned grid[3], block[3], smem;
  std::uint64_t stream;
  const unsigned char* attributes;
  unsigned count;
};

struct alignas(128) Map {
  std::uint64_t magic, id, rest[14];
};
constexpr std::uint64_t kMapMagic = 0x70616d726f736e74;

}  // namespace

extern "C" {

void standin_reset() {
  World& world = TheWorld();
  std::lock_guard<std::mutex> lock(world.mutex);
  world.log.clear();
  world.failures.clear();
}
void standin_fail(const char* call, int result, int after) {
  World& world = TheWorld();
  std::lock_guard<std::mutex> lock(world.mutex);
  world.failures[call] = {result, after};
}
std::size_t standin_log(char* text, std::size_t size) {
  World& world = TheWorld();
  std::lock_guard<std::mutex> lock(world.mutex);
  if (text != nullptr && size > world.log.size()) std::memcpy(text, world.log.c_str(), world.log.size() + 1);
  return world.log.size() + 1;
}

int cuInit(unsigned) { return Begin("cuInit"); }
int cuGetErrorName(int result, const char** name) {
  *name = result == 1 ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_STANDIN";
  return result == 999 ? 1 : 0;
}
int cuGetErrorString(int result, const char** text) {
  *text = result == 1 ? "invalid argument" : "asked for by the test";
  return result == 999 ? 1 : 0;
}
int cuDeviceGetCount(int* count) {
  *count = 8;
  return Begin("cuDeviceGetCount");
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return Begin("cuDeviceGet");
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = reinterpret_cast<void*>(static_cast<std::intptr_t>(device + 1));
  return Begin("cuDevicePrimaryCtxRetain");
}
int cuCtxPushCurrent_v2(void* context) {
  int result = Begin("cuCtxPushCurrent_v2");
  if (result == 0) contexts.push_back(static_cast<int>(reinterpret_cast<std::intptr_t>(context)) - 1);
  return result;
}
int cuCtxPopCurrent_v2(void** context) {
  if (contexts.empty()) return 201;
  *context = reinterpret_cast<void*>(static_cast<std::intptr_t>(contexts.back() + 1));
  contexts.pop_back();
  return Begin("cuCtxPopCurrent_v2");
}
int cuLibraryLoadData(Library** library, const char* image, void*, void*, unsigned, void*, void*, unsigned) {
  if (int result = Begin("cuLibraryLoadData"); result != 0) return result;
  auto* fresh = new Library;
  int kernels = 0, read = 0;
  if (std::sscanf(image, "kernels %d params%n", &kernels, &read) < 1) return 1;
  fresh->kernels = static_cast<unsigned>(kernels);
  image += read;
  for (std::size_t size = 0; std::sscanf(image, "%zu%n", &size, &read) == 1; image += read) {
    fresh->params.push_back(size);
  }
  std::sscanf(image, " store %d %d %zu", &fresh->store_param, &fresh->store_byte, &fresh->store_count);
  {
    std::lock_guard<std::mutex> lock(TheWorld().mutex);
    fresh->id = TheWorld().libraries++;
  }
  *library = fresh;
  Record record("cuLibraryLoadData");
  Log(record.Number("library", fresh->id));
  return 0;
}
int cuLibraryUnload(Library* library) {
  Record record("cuLibraryUnload");
  Log(record.Number("library", library->id));
  delete library;
  return Begin("cuLibraryUnload");
}
int cuLibraryGetKernelCount(unsigned* count, Library* library) {
  *count = library->kernels;
  return Begin("cuLibraryGetKernelCount");
}
int cuLibraryEnumerateKernels(Library** kernel, unsigned count, Library* library) {
  if (count != 1) return 1;
  *kernel = library;
  return Begin("cuLibraryEnumerateKernels");
}
int cuKernelSetAttribute(int attribute, int value, Library* kernel, int device) {
  Record record("cuKernelSetAttribute");
  Log(record.Number("library", kernel->id).Number("attribute", attribute).Number("value", value)
          .Number("device", device));
  return Begin("cuKernelSetAttribute");
}
int cuKernelGetFunction(void** function, Library* kernel) {
  Record record("cuKernelGetFunction");
  Log(record.Number("library", kernel->id).Number("device", contexts.empty() ? -1 : contexts.back()));
  *function = kernel;
  return contexts.empty() ? 201 : Begin("cuKernelGetFunction");
}
int cuKernelGetParamInfo(Library* kernel, std::size_t index, std::size_t* offset, std::size_t* size) {
  if (int result = Begin("cuKernelGetParamInfo"); result != 0) return result;
  if (index >= kernel->params.size()) return 1;
  *offset = 0;
  *size = kernel->params[index];
  return 0;
}
int cuTensorMapEncodeTiled(Map* map, int type, std::uint32_t rank, std::uint64_t address, const std::uint64_t* dims,
                           const std::uint64_t* strides, const std::uint32_t* box, const std::uint32_t* steps,
                           int interleave, int swizzle, int promotion, int fill) {
  if (int result = Begin("cuTensorMapEncodeTiled"); result != 0) return result;
  map->magic = kMapMagic;
  if (TheWorld().quiet) return 0;
  {
    std::lock_guard<std::mutex> lock(TheWorld().mutex);
    map->id = TheWorld().maps++;
  }
  Record record("cuTensorMapEncodeTiled");
  Log(record.Number("map", map->id).Number("misaligned", reinterpret_cast<std::uintptr_t>(map) % 128)
          .Number("type", type).Number("address", address).List("dims", dims, rank).List("strides", strides, rank - 1)
          .List("box", box, rank).List("element_strides", steps, rank).Number("interleave", interleave)
          .Number("swizzle", swizzle).Number("promotion", promotion).Number("fill", fill));
  return 0;
}
int cuLaunchKernelEx(const Config* config, Library* kernel, void** params, void** extra) {
  if (int result = Begin("cuLaunchKernelEx"); result != 0) return result;
  if (extra != nullptr) return 1;
  if (kernel->store_param >= 0) {
    std::memset(*static_cast<void**>(params[kernel->store_param]), kernel->store_byte, kernel->store_count);
  }
  if (TheWorld().quiet) return 0;
  Record record("cuLaunchKernelEx");
  record.Number("library", kernel->id).List("grid", config->grid, 3).List("block", config->block, 3)
      .Number("smem", config->smem).Number("stream", config->stream);
  record.Text(", \"attributes\": {");
  for (unsigned i = 0; i < config->count; ++i) {
    const unsigned char* attribute = config->attributes + 72 * i;
    int words[4];
    std::memcpy(&words[0], attribute, 4);
    std::memcpy(&words[1], attribute + 8, 12);
    record.Text((i ? ", \"" : "\"") + std::to_string(words[0]) + "\": [" + std::to_string(words[1]) + ", " +
                std::to_string(words[2]) + ", " + std::to_string(words[3]) + "]");
  }
  record.Text("}, \"params\": [");
  for (std::size_t i = 0; i < kernel->params.size(); ++i) {
    const auto* bytes = static_cast<const unsigned char*>(params[i]);
    record.Text(i ? ", \"" : "\"");
    if (kernel->params[i] == 128 && static_cast<const Map*>(params[i])->magic == kMapMagic) {
      record.Text("map " + std::to_string(static_cast<const Map*>(params[i])->id));
    } else {
      char hex[3];
      for (std::size_t b = 0; b < kernel->params[i]; ++b) {
        std::snprintf(hex, sizeof hex, "%02x", bytes[b]);
        record.Text(hex);
      }
    }
    record.Text("\"");
  }
  record.Text("]");
  Log(record);
  return 0;
}

// Memory is the host's. Devices 0 to 7 reach each other.
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 13 ? 1980000 : 0;
  return Begin("cuDeviceGetAttribute");
}
int cuDeviceCanAccessPeer(int* able, int device, int peer) {
  *able = device < 8 && peer < 8;
  return Begin("cuDeviceCanAccessPeer");
}
int cuCtxSynchronize() { return Begin("cuCtxSynchronize"); }
int cuCtxEnablePeerAccess(void* peer, unsigned) {
  Record record("cuCtxEnablePeerAccess");
  Log(record.Number("device", contexts.back()).Number("peer", reinterpret_cast<std::intptr_t>(peer) - 1));
  return Begin("cuCtxEnablePeerAccess");
}
int cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  *free = *total = std::size_t{1} << 30;
  return Begin("cuMemGetInfo_v2");
}
int cuMemAlloc_v2(void** address, std::size_t bytes) {
  if (int result = Begin("cuMemAlloc_v2"); result != 0) return result;
  *address = std::malloc(bytes);
  Record record("cuMemAlloc_v2");
  Log(record.Number("device", contexts.back()).Number("bytes", bytes)
          .Number("address", reinterpret_cast<std::uintptr_t>(*address)));
  return 0;
}
int cuMemFree_v2(void* address) {
  Record record("cuMemFree_v2");
  Log(record.Number("device", contexts.back()).Number("address", reinterpret_cast<std::uintptr_t>(address)));
  std::free(address);
  return Begin("cuMemFree_v2");
}
int cuMemsetD8_v2(void* address, unsigned char byte, std::size_t bytes) {
  std::memset(address, byte, bytes);
  return Begin("cuMemsetD8_v2");
}
int cuMemcpyHtoD_v2(void* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
  return Begin("cuMemcpyHtoD_v2");
}
int cuMemcpyDtoH_v2(void* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
  return Begin("cuMemcpyDtoH_v2");
}
// A handle is the address; it opens as an address 4096 bytes later, which only its closing may name.
struct IpcHandle {
  char* address;
  char spare[56];
};
int cuIpcGetMemHandle(IpcHandle* handle, char* address) {
  *handle = IpcHandle{address, {}};
  return Begin("cuIpcGetMemHandle");
}
int cuIpcOpenMemHandle_v2(char** address, IpcHandle handle, unsigned) {
  if (int result = Begin("cuIpcOpenMemHandle_v2"); result != 0) return result;
  *address = handle.address + 4096;
  Record record("cuIpcOpenMemHandle_v2");
  Log(record.Number("device", contexts.back()).Number("address", reinterpret_cast<std::uintptr_t>(*address)));
  return 0;
}
int cuIpcCloseMemHandle(char* address) {
  Record record("cuIpcCloseMemHandle");
  Log(record.Number("device", contexts.back()).Number("address", reinterpret_cast<std::uintptr_t>(address)));
  return Begin("cuIpcCloseMemHandle");
}

}  // extern "C"
