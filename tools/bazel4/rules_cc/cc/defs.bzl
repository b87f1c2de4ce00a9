"""The C++ rules built into Bazel 4, under the names that its own toolchain files load."""

cc_binary = native.cc_binary
cc_library = native.cc_library
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
