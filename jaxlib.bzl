"""The XLA FFI headers of an installed jaxlib as the repository @jaxlib. Nothing is downloaded."""

_WHERE = "import importlib.util as u; print(u.find_spec('jaxlib').submodule_search_locations[0])"

_BUILD = """
cc_library(
    name = "xla_ffi",
    hdrs = glob(["include/xla/ffi/api/*.h"]),
    includes = ["include"],
    visibility = ["//visibility:public"],
)
"""

def _jaxlib_headers_impl(ctx):
    python = ctx.os.environ.get("JAXMOE_PYTHON", "python3")
    found = ctx.execute([python, "-c", _WHERE])
    if found.return_code != 0:
        fail("%s has no jaxlib; name a Python that has one in JAXMOE_PYTHON: %s" % (python, found.stderr))
    ctx.symlink(found.stdout.strip() + "/include", "include")
    ctx.file("BUILD", _BUILD)

jaxlib_headers = repository_rule(
    implementation = _jaxlib_headers_impl,
    environ = ["JAXMOE_PYTHON"],
    local = True,
)
