// In place of the kernels' own: assertions of the device only, without the host's exceptions. A broken one prints where
// and stops the context.
#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

#define EP_STATIC_ASSERT(condition, reason) static_assert(condition, reason)
#define EP_DEVICE_ASSERT(condition)                                       \
    do {                                                                  \
        if (!(condition)) {                                               \
            printf("DeepEP: line %d: %s is false\n", __LINE__, #condition); \
            __trap();                                                     \
        }                                                                 \
    } while (0)
#define EP_UNIFIED_ASSERT(condition) EP_DEVICE_ASSERT(condition)
#define EP_HOST_ASSERT(condition)
