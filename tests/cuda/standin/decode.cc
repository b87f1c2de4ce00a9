// Decodes length-prefixed specifications from the standard input under the sanitisers, each in an allocation of exactly
// its size, and says how many were accepted.
#include <cstdint>
#include <cstdio>
#include <memory>

#include "ffi/spec.h"

int main() {
  unsigned accepted = 0, total = 0;
  for (std::uint32_t size = 0; std::fread(&size, sizeof size, 1, stdin) == 1; ++total) {
    std::unique_ptr<unsigned char[]> bytes(new unsigned char[size]);
    if (std::fread(bytes.get(), 1, size, stdin) != size) return 2;
    jaxmoe::CallSpec spec;
    accepted += jaxmoe::Decode(bytes.get(), size, &spec).ok();
  }
  std::printf("%u of %u\n", accepted, total);
}
