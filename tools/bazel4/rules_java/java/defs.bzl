"""The Java rules built into Bazel 4, under the names that its own toolchain files load."""

java_import = native.java_import
java_runtime = native.java_runtime
java_toolchain = native.java_toolchain
