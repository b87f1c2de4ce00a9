#include "ffi/kernels.h"

#include <cstdio>
#include <memory>
#include <unordered_map>

namespace jaxmoe {
namespace {

struct Table {
  std::mutex mutex;
  std::string directory;
  std::unordered_map<std::string, std::unique_ptr<LoadedKernel>> kernels;
};

Table& TheTable() {
  static Table* table = new Table;  // outlives every thread that may still launch at exit
  return *table;
}

Status ReadCubin(const std::string& directory, const std::string& key, const std::string& name,
                 std::vector<char>* image) {
  std::string path = directory + "/" + key + ".cubin";
  // No streams: where libstdc++ is linked in statically, several copies of them in one process do not get along.
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (directory.empty() || file == nullptr) {
    return NotFound("KernelNotCompiled: the cubin '" + key + "' of kernel '" + name + "' is not in " +
                    (directory.empty() ? std::string("any cache: no cubin directory is set") : "'" + directory + "'") +
                    "; run `jaxmoe warmup` for this model and GPU architecture on this machine");
  }
  char chunk[65536];
  while (std::size_t count = std::fread(chunk, 1, sizeof chunk, file.get())) {
    image->insert(image->end(), chunk, chunk + count);
  }
  if (std::ferror(file.get()) || image->empty()) {
    return Internal("the cubin '" + path + "' of kernel '" + name +
                    "' is empty or cannot be read; delete it and run `jaxmoe warmup`");
  }
  return {};
}

Status OnlyKernel(const cuda::Driver& driver, cuda::Library library, const std::string& key, cuda::Kernel* kernel) {
  unsigned count = 0;
  if (auto result = driver.LibraryGetKernelCount(&count, library); result != 0) {
    return Internal(driver.Describe("cuLibraryGetKernelCount", result));
  }
  if (count != 1) {
    return Internal("the cubin '" + key + "' holds " + std::to_string(count) +
                    " kernels instead of one; delete it and run `jaxmoe warmup`");
  }
  if (auto result = driver.LibraryEnumerateKernels(kernel, 1, library); result != 0) {
    return Internal(driver.Describe("cuLibraryEnumerateKernels", result));
  }
  return {};
}

// The driver answers an index behind the last parameter with "invalid value".
Status ParamBytes(const cuda::Driver& driver, cuda::Kernel kernel, std::vector<std::size_t>* bytes) {
  constexpr cuda::Result kInvalidValue = 1;
  std::size_t offset = 0, size = 0;
  for (;;) {
    auto result = driver.KernelGetParamInfo(kernel, bytes->size(), &offset, &size);
    if (result == kInvalidValue) return {};
    if (result != 0) return Internal(driver.Describe("cuKernelGetParamInfo", result));
    bytes->push_back(size);
  }
}

}  // namespace

Status LoadedKernel::PrepareSlowly(int device, std::uint32_t dynamic_smem) {
  if (device < 0 || device >= kMaxDevices) {
    return InvalidArgument("device ordinal " + std::to_string(device) + " is outside 0.." +
                           std::to_string(kMaxDevices - 1));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  std::int64_t allowed = allowed_smem_[device].load(std::memory_order_relaxed);
  if (allowed > static_cast<std::int64_t>(dynamic_smem)) return {};
  cuda::Device handle = 0;
  if (auto result = driver_.DeviceGet(&handle, device); result != 0) {
    return Internal(driver_.Describe("cuDeviceGet", result));
  }
  if (auto result = driver_.KernelSetAttribute(cuda::kMaxDynamicSharedSizeBytes, static_cast<int>(dynamic_smem),
                                               handle_, handle);
      result != 0) {
    return Internal(driver_.Describe("cuKernelSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES)", result));
  }
  if (allowed == 0) {
    // Lazy loading would otherwise load the kernel in its first launch, which may be under stream capture or wait for
    // a kernel that spins until a peer's kernel runs. XLA works in primary contexts too; the reference is kept.
    cuda::Context context = nullptr;
    if (auto result = driver_.PrimaryContextRetain(&context, handle); result != 0) {
      return Internal(driver_.Describe("cuDevicePrimaryCtxRetain", result));
    }
    if (auto result = driver_.ContextPush(context); result != 0) {
      return Internal(driver_.Describe("cuCtxPushCurrent", result));
    }
    cuda::Function function = nullptr;
    auto loaded = driver_.KernelGetFunction(&function, handle_);
    auto popped = driver_.ContextPop(&context);
    if (loaded != 0) return Internal(driver_.Describe("cuKernelGetFunction", loaded));
    if (popped != 0) return Internal(driver_.Describe("cuCtxPopCurrent", popped));
  }
  allowed_smem_[device].store(static_cast<std::int64_t>(dynamic_smem) + 1, std::memory_order_release);
  return {};
}

void SetCubinDirectory(std::string directory) {
  Table& table = TheTable();
  std::lock_guard<std::mutex> lock(table.mutex);
  table.directory = std::move(directory);
}

Status FindKernel(const cuda::Driver& driver, const std::string& key, const std::string& name, LoadedKernel** kernel) {
  Table& table = TheTable();
  std::lock_guard<std::mutex> lock(table.mutex);
  if (auto found = table.kernels.find(key); found != table.kernels.end()) {
    *kernel = found->second.get();
    return {};
  }
  std::vector<char> image;
  if (Status status = ReadCubin(table.directory, key, name, &image); !status.ok()) return status;
  cuda::Library library = nullptr;
  if (auto result = driver.LibraryLoadData(&library, image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
      result != 0) {
    return Internal(driver.Describe("cuLibraryLoadData", result) + " on the cubin '" + key + "' of kernel '" + name +
                    "'");
  }
  cuda::Kernel handle = nullptr;
  std::vector<std::size_t> params;
  Status status = OnlyKernel(driver, library, key, &handle);
  if (status.ok()) status = ParamBytes(driver, handle, &params);
  if (!status.ok()) {
    driver.LibraryUnload(library);
    return status;
  }
  auto loaded = std::make_unique<LoadedKernel>(driver, handle, std::move(params));
  *kernel = loaded.get();
  table.kernels.emplace(key, std::move(loaded));
  return {};
}

}  // namespace jaxmoe
