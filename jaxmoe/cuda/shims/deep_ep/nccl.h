// Stands for NCCL's host header: on the NVLink path the kernels need its handle types and nothing else.
#pragma once

#include <cstdint>

struct ncclComm;
struct jaxmoe_peer_table;

typedef ncclComm* ncclComm_t;
typedef jaxmoe_peer_table* ncclWindow_t;
