/* SPDX-License-Identifier: Apache-2.0
 *
 * Units whose shards stay in memory of the host while a GPU computes. Shards lie in symmetric memory, as all do, which
 * is pinned here; reduced gradients come to pinned memory, too. So the host waits for no copy: shards go up, and
 * gradients come down, on a stream each, beside the one that computes, and whoever reads them on the host waits there.
 */
#include <unistd.h>

#include <tutti/streams.h>

#include "parallel/shard.h"
#include "tensor/on_device.h"
#include "tensor/symmetric.h"

bool tu_shard_is_offloaded(const tu_shard_unit *unit) {
    return unit->gathered_device != unit->device;
}

/* ---- pinned shards ---- */

bool tu_offload_is_pinned(const tu_shard_unit *unit) {
    return unit->device == TUTTI_CPU && tu_is_remote(unit->gathered_device) && unit->elements > 0;
}

/* What is pinned shares no page with other memory. */
static tt_tensor *in_whole_pages(const tu_shard_unit *unit, tutti_dtype dtype) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), needed = (size_t)unit->elements * tu_dtype_bytes[dtype];
    size_t bytes = (needed + page - 1) / page * page;
    tutti_memory_options options = TUTTI_MEMORY_OPTIONS_INIT;
    options.alignment = page;
    tutti_memory *memory;
    tu_shape shape;
    if (tu_pending_take(tu_shape_from("fully_shard", tt_shape(unit->elements), dtype, TUTTI_CPU, &shape)) != TUTTI_OK ||
        tu_pending_take(tutti_memory_alloc(tutti_group_world(unit->all->group), bytes, &options, &memory)) != TUTTI_OK)
        return NULL;
    tt_tensor *x = tu_tensor_on(tu_symm_storage(memory, bytes), &shape);
    if (x == NULL)
        tu_pending_take(TUTTI_ERROR_MEMORY);
    return x != NULL ? tu_scope_own(x) : NULL;
}

tt_tensor *tu_offload_shard(const tu_shard_unit *unit, tutti_dtype dtype) {
    tu_device *device;
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_device_get(unit->gathered_device, &device)) != TUTTI_OK)
        return NULL;
    tt_tensor *shard = in_whole_pages(unit, dtype);
    if (shard == NULL)
        return NULL;
    if (tu_storage_pin(shard->storage, device) != TUTTI_OK) /* the backend has warned: the host waits for copies then */
        tutti_error_clear();
    return shard;
}

/* Copies that a graph or a replay notes are its own affair. */
static bool is_async(const tu_shard_unit *unit) {
    tu_device *device;
    return unit->shard->storage->pinned_by != NULL && !tu_is_capturing() &&
           tu_device_get(unit->gathered_device, &device) == TUTTI_OK && !tu_device_capturing(device);
}

/* ---- streams ---- */

bool tu_offload_begin(tu_shard_unit *unit, tu_offload_way way, void **before) {
    tutti_device device = unit->gathered_device;
    void **stream = &unit->all->streams[way];
    *before = NULL;
    if (!tu_shard_is_offloaded(unit) || tu_self()->pending != TUTTI_OK || !is_async(unit) ||
        (*stream == NULL && (*stream = tt_stream_new(device)) == NULL))
        return false;
    tt_event *here = tt_event_record(device);
    *before = tt_stream(device);
    bool begun = here != NULL && tt_stream_set(device, *stream);
    if (begun && !tt_event_join(here)) {
        tu_offload_end(unit, *before, false);
        begun = false;
    }
    tt_event_release(here);
    return begun;
}

void tu_offload_end(const tu_shard_unit *unit, void *before, bool join) {
    tu_pending_copy error;
    tutti_device device = unit->gathered_device;
    tt_event *behind = join ? tt_event_record(device) : NULL;
    tu_pending_save(&error);
    tt_stream_set(device, before);
    tu_pending_restore(&error);
    if (behind != NULL)
        tt_event_join(behind);
    tt_event_release(behind);
}

void tu_offload_release(tt_fully_sharded *all) {
    for (int way = 0; way < TU_OFFLOAD_WAYS; way++)
        if (all->streams[way] != NULL)
            tt_stream_release(all->options.device, all->streams[way]);
}

/* ---- copies ---- */

tt_tensor *tu_offload_up(const tu_shard_unit *unit) {
    if (!is_async(unit))
        return tt_to_device(tt_to(unit->shard, unit->gathered_dtype), unit->gathered_device);
    tt_tensor *there =
        tt_empty(tt_shape(unit->elements), unit->dtype, TUTTI_OPTIONS(tt_options, .device = unit->gathered_device));
    return tt_to(tt_copy_async_(there, unit->shard), unit->gathered_dtype);
}

/* The memory of the last gradients, unless somebody has kept them. */
static tt_tensor *memory_for(tu_shard_unit *unit, const tt_tensor *reduction) {
    const tt_tensor *last = unit->home;
    if (last != NULL && last->dtype == reduction->dtype &&
        atomic_load_explicit(&last->storage->references, memory_order_acquire) == 1)
        return unit->home;
    tu_tensor_drop(unit->home);
    unit->home = tu_tensor_hold(tt_empty_pinned(tt_shape(unit->elements), (tutti_dtype)reduction->dtype));
    return unit->home;
}

tt_tensor *tu_offload_down(tu_shard_unit *unit, tt_tensor *reduction) {
    void *before;
    if (unit->comes_home) {
        unit->comes_home = false;
        return unit->home;
    }
    if (!tu_offload_begin(unit, TU_OFFLOAD_DOWN, &before))
        return tt_to_device(reduction, unit->device);
    tt_tensor *home = memory_for(unit, reduction);
    tt_copy_async_(home, reduction);
    tu_offload_end(unit, before, false);
    return home;
}

void tu_offload_down_early(tu_shard_unit *unit) {
    if (!tu_shard_is_offloaded(unit) || unit->all->options.replicas != NULL || unit->partial != NULL ||
        unit->comes_home || tu_self()->pending != TUTTI_OK || !is_async(unit))
        return;
    tu_offload_down(unit, unit->reduction);
    unit->comes_home = tu_self()->pending == TUTTI_OK;
}
