/* SPDX-License-Identifier: Apache-2.0
 *
 * All of libtutti, in the order in which a newcomer meets it.
 *
 *     status.h        how every function says what went wrong
 *     world.h         joining a job, or starting one: tutti_world_open, tutti_spawn
 *     group.h         subsets of ranks; mesh.h arranges them in dimensions
 *     collective.h    all_reduce, all_gather, … on any memory; call.h has its options, work.h its asynchronous form
 *     memory.h        symmetric blocks; peers.h reads, writes and signals those of others; pool.h reuses them
 *     named.h         operations that work on symmetric blocks by a given algorithm
 *     backend.h       libraries that all ranks open together: NVSHMEM, NCCL
 *     dtype.h         element types, reductions, and the arithmetic that makes results the same bits everywhere
 *     device.h        where memory lies
 *     event.h         deaths and ends of groups, for servers
 *     store.h         key-value stores, for ranks that have to find each other
 *     connectivity.h  which ranks and processors are near each other
 *     trace.h         the flight recorder; log.h the log; fault.h failing on purpose
 *     export.h        the version, and how structs with options are made
 *
 * libtutti-tensor is tensors.h.
 */
#ifndef TUTTI_TUTTI_H
#define TUTTI_TUTTI_H

#include <tutti/backend.h>
#include <tutti/call.h>
#include <tutti/collective.h>
#include <tutti/connectivity.h>
#include <tutti/device.h>
#include <tutti/dtype.h>
#include <tutti/event.h>
#include <tutti/export.h>
#include <tutti/fault.h>
#include <tutti/group.h>
#include <tutti/log.h>
#include <tutti/memory.h>
#include <tutti/mesh.h>
#include <tutti/named.h>
#include <tutti/peers.h>
#include <tutti/pool.h>
#include <tutti/status.h>
#include <tutti/store.h>
#include <tutti/trace.h>
#include <tutti/work.h>
#include <tutti/world.h>

#endif
