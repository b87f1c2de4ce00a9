// Launches a specification many times and prints the allocations made and the nanoseconds taken per call.
// usage: steady SPEC CUBIN_DIRECTORY CALLS      (JAXMOE_LIBCUDA names the driver)
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <new>
#include <vector>

#include "ffi/kernels.h"
#include "ffi/program.h"

static long allocations = 0;

void* operator new(std::size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

int main(int, char** argv) {
  std::ifstream file(argv[1], std::ios::binary);
  std::vector<char> spec{std::istreambuf_iterator<char>(file), {}};
  jaxmoe::SetCubinDirectory(argv[2]);
  std::unique_ptr<jaxmoe::Program> program;
  auto check = [](const jaxmoe::Status& status) {
    if (status.ok()) return;
    std::fprintf(stderr, "%s\n", status.message.c_str());
    std::exit(1);
  };
  check(jaxmoe::Program::Create(reinterpret_cast<const unsigned char*>(spec.data()), spec.size(), &program));
  std::vector<jaxmoe::DeviceBuffer> buffers(16, {reinterpret_cast<void*>(1l << 40), 1ull << 40});
  jaxmoe::CallBuffers call{buffers.data(), buffers.size(), buffers.data(), buffers.size()};
  check(program->Launch(call, 0, nullptr));
  long before = allocations, calls = std::atol(argv[3]);
  auto start = std::chrono::steady_clock::now();
  for (long i = 0; i < calls; ++i) check(program->Launch(call, 0, nullptr));
  std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - start;
  std::printf("%ld %.1f\n", allocations - before, taken.count() / calls);
}
