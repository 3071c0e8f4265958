/* SPDX-License-Identifier: Apache-2.0
 *
 * Device meshes. A root holds the rank map and its layout: a size and a stride per root dimension. A dimension of any
 * mesh is a list of root dimensions, joined in order; so slicing and flattening never copy the map, and layouts compare
 * by sizes and strides.
 */
#include <tutti/mesh.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "world/world.h"

typedef struct dimension {
    char name[64]; /* "" none */
    int parts;
    int part[TUTTI_MESH_DIMS]; /* root dimensions, ascending */
    tutti_group *group;        /* this rank's; NULL: none were made */
} dimension;

typedef struct root {
    _Atomic uint32_t references; /* meshes on it */
    tutti_world *world;
    tutti_device device; /* a kind */
    int dim_count, size[TUTTI_MESH_DIMS], stride[TUTTI_MESH_DIMS];
    bool member;
    int coordinate[TUTTI_MESH_DIMS];
    dimension dims[TUTTI_MESH_DIMS]; /* as the root mesh has them, for slices */
    pthread_mutex_t lock;            /* `flat` */
    struct flat *flat;               /* remembered by tutti_mesh_flatten */
    int64_t timeout_ns;
    int count;
    int map[]; /* world ranks, row-major */
} root;

typedef struct flat {
    struct flat *next;
    dimension dim;
} flat;

struct tutti_mesh {
    _Atomic uint32_t references;
    root *root;
    int dim_count;
    dimension dims[TUTTI_MESH_DIMS];
};

/* ---- life ---- */

static void release_root(root *root) {
    if (atomic_fetch_sub_explicit(&root->references, 1, memory_order_acq_rel) != 1)
        return;
    for (int i = 0; i < root->dim_count; i++)
        tutti_group_release(root->dims[i].group);
    while (root->flat != NULL) {
        flat *next = root->flat->next;
        tutti_group_release(root->flat->dim.group);
        free(root->flat);
        root->flat = next;
    }
    pthread_mutex_destroy(&root->lock);
    tutti_world *world = root->world;
    free(root);
    tu_world_handle(world, "mesh", -1);
}

tutti_mesh *tutti_mesh_keep(tutti_mesh *mesh) {
    if (mesh != NULL)
        atomic_fetch_add_explicit(&mesh->references, 1, memory_order_relaxed);
    return mesh;
}

void tutti_mesh_release(tutti_mesh *mesh) {
    if (mesh == NULL || tu_world_forked(mesh->root->world) ||
        atomic_fetch_sub_explicit(&mesh->references, 1, memory_order_acq_rel) != 1)
        return;
    release_root(mesh->root); /* which has the groups */
    free(mesh);
}

/* A mesh of some dimensions of the root; it keeps the root, which keeps the groups. */
static tutti_status make_mesh(root *root, const dimension *dims, int count, tutti_mesh **out) {
    tutti_mesh *mesh = calloc(1, sizeof *mesh);
    if (mesh == NULL)
        return tu_error_memory("a mesh", sizeof *mesh);
    atomic_init(&mesh->references, 1);
    atomic_fetch_add_explicit(&root->references, 1, memory_order_relaxed);
    mesh->root = root;
    mesh->dim_count = count;
    memcpy(mesh->dims, dims, sizeof *dims * (size_t)count);
    *out = mesh;
    return TUTTI_OK;
}

/* ---- layout ---- */

static int dim_size(const root *root, const dimension *dim) {
    int size = 1;
    for (int i = 0; i < dim->parts; i++)
        size *= root->size[dim->part[i]];
    return size;
}

/* Where index `index` of a dimension lies in the map, counted from the start of that dimension. */
static int dim_offset(const root *root, const dimension *dim, int index) {
    int offset = 0;
    for (int i = dim->parts - 1; i >= 0; i--) {
        int part = dim->part[i];
        offset += index % root->size[part] * root->stride[part];
        index /= root->size[part];
    }
    return offset;
}

static int dim_coordinate(const root *root, const dimension *dim) {
    int index = 0;
    for (int i = 0; i < dim->parts; i++)
        index = index * root->size[dim->part[i]] + root->coordinate[dim->part[i]];
    return index;
}

static bool has_part(const dimension *dim, int part) {
    for (int i = 0; i < dim->parts; i++)
        if (dim->part[i] == part)
            return true;
    return false;
}

/* ---- making ---- */

static tutti_status check_shape(const tutti_world *world, tutti_device device, const int *shape, int dim_count,
                                const tutti_mesh_options *options, int *count) {
    if (device == 0 || tutti_device_kind(device) != device)
        return tu_error(
            TUTTI_ERROR_ARGUMENT,
            "a mesh is made for a kind of device (TUTTI_CPU, TUTTI_CUDA), without an index, not for %s (%d)",
            tutti_device_name(device), device);
    if (shape == NULL || dim_count <= 0 || dim_count > TUTTI_MESH_DIMS)
        return tu_error(TUTTI_ERROR_ARGUMENT, "a mesh has 1 to %d dimensions, not %d", TUTTI_MESH_DIMS, dim_count);
    int64_t product = 1;
    for (int i = 0; i < dim_count; i++) {
        if (shape[i] <= 0)
            return tu_error(TUTTI_ERROR_ARGUMENT, "dimension %d of the mesh has %d ranks; it needs at least 1", i,
                            shape[i]);
        product *= shape[i];
        if (product > world->size)
            return tu_error(TUTTI_ERROR_ARGUMENT, "the mesh has more ranks than the world, which has %d", world->size);
    }
    if (options->timeout_ns < 0)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "tutti_mesh_options.timeout_ns is %lld; it must be 0 (the world's) or more",
                        (long long)options->timeout_ns);
    if (options->ranks == NULL ? options->rank_count != 0 : options->rank_count != product)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "the mesh needs %lld ranks, but tutti_mesh_options.rank_count is %d and the list %s",
                        (long long)product, options->rank_count, options->ranks != NULL ? "is given" : "is NULL");
    for (int i = 0; options->names != NULL && i < dim_count; i++) {
        if (options->names[i] == NULL || options->names[i][0] == 0 || strlen(options->names[i]) > 63)
            return tu_error(TUTTI_ERROR_ARGUMENT,
                            "dimension %d has no name, or one longer than 63 characters; name all or none", i);
        for (int j = 0; j < i; j++)
            if (strcmp(options->names[i], options->names[j]) == 0)
                return tu_error(TUTTI_ERROR_ARGUMENT, "two dimensions have the name \"%s\"; names must be unique",
                                options->names[i]);
    }
    *count = (int)product;
    return TUTTI_OK;
}

static tutti_status fill_map(root *root, const int *ranks) {
    bool *seen = calloc((size_t)root->world->size, sizeof *seen);
    if (seen == NULL)
        return tu_error_memory("a mesh", (size_t)root->world->size);
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < root->count && status == TUTTI_OK; i++) {
        int rank = ranks != NULL ? ranks[i] : i;
        if (rank < 0 || rank >= root->world->size)
            status = tu_error(TUTTI_ERROR_ARGUMENT, "rank %d of the mesh is not in this world, whose ranks are 0 to %d",
                              rank, root->world->size - 1);
        else if (seen[rank])
            status = tu_error(TUTTI_ERROR_ARGUMENT, "rank %d is twice in the mesh", rank);
        else
            seen[rank] = true;
        root->map[i] = rank;
        if (rank == root->world->rank) {
            root->member = true;
            for (int dim = 0; dim < root->dim_count; dim++)
                root->coordinate[dim] = i / root->stride[dim] % root->size[dim];
        }
    }
    free(seen);
    return status;
}

/* The groups along one dimension, for every choice of the coordinates outside of it; all ranks of the world make all of
 * them. */
static tutti_status make_groups(root *root, dimension *dim, const char *description) {
    int size = dim_size(root, dim);
    if (size == root->world->size) {
        dim->group = tutti_group_keep(root->world->group);
        return TUTTI_OK;
    }
    dimension rest = { .parts = 0 };
    for (int part = 0; part < root->dim_count; part++)
        if (!has_part(dim, part))
            rest.part[rest.parts++] = part;
    int *ranks = malloc(sizeof(int) * (size_t)size);
    if (ranks == NULL)
        return tu_error_memory("a list of ranks", sizeof(int) * (size_t)size);
    tutti_status status = TUTTI_OK;
    tutti_group *own = TUTTI_NON_GROUP_MEMBER;
    int choices = dim_size(root, &rest);
    for (int choice = 0; choice < choices && status == TUTTI_OK; choice++) {
        int start = dim_offset(root, &rest, choice);
        for (int i = 0; i < size; i++)
            ranks[i] = root->map[start + dim_offset(root, dim, i)];
        tutti_group *group;
        status = tutti_group_new(
            root->world, ranks, size,
            TUTTI_OPTIONS(tutti_group_options, .description = description, .timeout_ns = root->timeout_ns), &group);
        if (status == TUTTI_OK && group != TUTTI_NON_GROUP_MEMBER)
            own = group;
    }
    free(ranks);
    if (status == TUTTI_OK)
        dim->group = own;
    else
        tutti_group_release(own);
    return status;
}

static tutti_status make_root_groups(root *root) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < root->dim_count && status == TUTTI_OK; i++) {
        char description[64];
        if (root->dims[i].name[0] != 0)
            snprintf(description, sizeof description, "mesh_%.58s", root->dims[i].name);
        else
            snprintf(description, sizeof description, "mesh_dim_%d", i);
        status = make_groups(root, &root->dims[i], description);
    }
    return status;
}

tutti_status tutti_mesh_new(tutti_world *world, tutti_device device, const int *shape, int dim_count,
                            const tutti_mesh_options *given, tutti_mesh **mesh) {
    tutti_mesh_options options = TUTTI_MESH_OPTIONS_INIT;
    int count = 0;
    tutti_status status = tu_world_check(world);
    if (status == TUTTI_OK)
        status = tu_options_copy("tutti_mesh_options", given, &options, sizeof options);
    if (status == TUTTI_OK && mesh == NULL)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "tutti_mesh_new: where the mesh goes is NULL");
    if (status == TUTTI_OK)
        status = check_shape(world, device == 0 ? TUTTI_CPU : device, shape, dim_count, &options, &count);
    if (status != TUTTI_OK)
        return status;
    root *root = calloc(1, sizeof *root + sizeof(int) * (size_t)count);
    if (root == NULL)
        return tu_error_memory("a mesh", sizeof *root + sizeof(int) * (size_t)count);
    atomic_init(&root->references, 1);
    root->world = world;
    root->count = count;
    root->timeout_ns = options.timeout_ns;
    root->dim_count = dim_count;
    root->device = device == 0 ? TUTTI_CPU : device;
    pthread_mutex_init(&root->lock, NULL);
    for (int i = dim_count - 1, stride = 1; i >= 0; stride *= shape[i], i--) {
        root->size[i] = shape[i];
        root->stride[i] = stride;
        root->dims[i] = (dimension){ .parts = 1, .part = { i } };
        snprintf(root->dims[i].name, sizeof root->dims[i].name, "%s", options.names != NULL ? options.names[i] : "");
    }
    tu_world_handle(world, "mesh", 1);
    status = fill_map(root, options.ranks);
    if (status == TUTTI_OK && !options.no_groups)
        status = make_root_groups(root);
    if (status == TUTTI_OK)
        status = make_mesh(root, root->dims, dim_count, mesh);
    release_root(root); /* the mesh keeps it */
    return status;
}

/* ---- asking ---- */

int tutti_mesh_dim_count(const tutti_mesh *mesh) {
    return mesh != NULL ? mesh->dim_count : -1;
}

int tutti_mesh_size(const tutti_mesh *mesh, int dim) {
    if (mesh == NULL || dim < -1 || dim >= mesh->dim_count)
        return -1;
    if (dim >= 0)
        return dim_size(mesh->root, &mesh->dims[dim]);
    int size = 1;
    for (int i = 0; i < mesh->dim_count; i++)
        size *= dim_size(mesh->root, &mesh->dims[i]);
    return size;
}

tutti_device tutti_mesh_device(const tutti_mesh *mesh) {
    return mesh != NULL ? mesh->root->device : 0;
}

const char *tutti_mesh_dim_name(const tutti_mesh *mesh, int dim) {
    if (mesh == NULL || dim < 0 || dim >= mesh->dim_count || mesh->dims[dim].name[0] == 0)
        return NULL;
    return mesh->dims[dim].name;
}

static tutti_status need_names(const tutti_mesh *mesh) {
    if (mesh == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "the mesh is NULL");
    if (mesh->dims[0].name[0] == 0)
        return tu_error(TUTTI_ERROR_STATE,
                        "this mesh has no dimension names: give tutti_mesh_options.names when making it");
    return TUTTI_OK;
}

static int find_dim(const tutti_mesh *mesh, const char *name) {
    for (int i = 0; i < mesh->dim_count; i++)
        if (strcmp(mesh->dims[i].name, name) == 0)
            return i;
    return -1;
}

static tutti_status unknown_name(const tutti_mesh *mesh, const char *name) {
    char names[256] = "";
    for (int i = 0; i < mesh->dim_count; i++) {
        size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", i > 0 ? ", " : "", mesh->dims[i].name);
    }
    return tu_error(TUTTI_ERROR_NOT_FOUND, "no dimension of this mesh has the name \"%s\"; they are: %s", name, names);
}

tutti_status tutti_mesh_dim(const tutti_mesh *mesh, const char *name, int *dim) {
    tutti_status status = need_names(mesh);
    if (status != TUTTI_OK)
        return status;
    if (name == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "the name of the dimension is NULL");
    int found = find_dim(mesh, name);
    if (found < 0)
        return unknown_name(mesh, name);
    *dim = found;
    return TUTTI_OK;
}

void tutti_mesh_ranks(const tutti_mesh *mesh, int *ranks) {
    const root *root = mesh->root;
    int start = 0;
    for (int part = 0; part < root->dim_count; part++) {
        bool inside = false;
        for (int i = 0; i < mesh->dim_count; i++)
            inside = inside || has_part(&mesh->dims[i], part);
        if (!inside)
            start += root->coordinate[part] * root->stride[part];
    }
    int count = tutti_mesh_size(mesh, -1);
    for (int index = 0; index < count; index++) {
        int offset = start, rest = index;
        for (int i = mesh->dim_count - 1; i >= 0; i--) {
            int size = dim_size(root, &mesh->dims[i]);
            offset += dim_offset(root, &mesh->dims[i], rest % size);
            rest /= size;
        }
        ranks[index] = root->map[offset];
    }
}

bool tutti_mesh_coordinate(const tutti_mesh *mesh, int *coordinate) {
    if (mesh == NULL || !mesh->root->member)
        return false;
    for (int i = 0; i < mesh->dim_count; i++)
        coordinate[i] = dim_coordinate(mesh->root, &mesh->dims[i]);
    return true;
}

tutti_status tutti_mesh_group(const tutti_mesh *mesh, int dim, tutti_group **group) {
    if (mesh == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "the mesh is NULL");
    if (dim == -1 && mesh->dim_count > 1)
        return tu_error(TUTTI_ERROR_ARGUMENT, "this mesh has %d dimensions: say which dimension's group you want",
                        mesh->dim_count);
    if (dim < -1 || dim >= mesh->dim_count)
        return tu_error(TUTTI_ERROR_RANGE, "dimension %d is not in [0, %d)", dim, mesh->dim_count);
    tutti_group *found = mesh->dims[dim < 0 ? 0 : dim].group;
    if (found == NULL)
        return tu_error(TUTTI_ERROR_STATE, "this mesh was made without groups (no_groups)");
    /* A dimension that spans the world uses the default group, of which every rank is a member. */
    *group = tutti_group_keep(found);
    return TUTTI_OK;
}

tutti_status tutti_mesh_local_rank(const tutti_mesh *mesh, int dim, int *rank) {
    tutti_group *group;
    tutti_status status = tutti_mesh_group(mesh, dim, &group);
    if (status != TUTTI_OK)
        return status;
    *rank = tutti_group_rank(group);
    tutti_group_release(group);
    return TUTTI_OK;
}

static bool same_layout(const root *a, const dimension *left, const root *b, const dimension *right) {
    if (left->parts != right->parts)
        return false;
    for (int i = 0; i < left->parts; i++)
        if (a->size[left->part[i]] != b->size[right->part[i]] || a->stride[left->part[i]] != b->stride[right->part[i]])
            return false;
    return true;
}

bool tutti_mesh_equal(const tutti_mesh *left, const tutti_mesh *right) {
    if (left == right)
        return true;
    if (left == NULL || right == NULL || left->dim_count != right->dim_count)
        return false;
    const root *a = left->root, *b = right->root;
    if (a->world != b->world || a->device != b->device || a->count != b->count ||
        memcmp(a->map, b->map, sizeof(int) * (size_t)a->count) != 0)
        return false;
    for (int i = 0; i < left->dim_count; i++)
        if (strcmp(left->dims[i].name, right->dims[i].name) != 0 || !same_layout(a, &left->dims[i], b, &right->dims[i]))
            return false;
    return true;
}

/* ---- slicing and flattening ---- */

static const flat *find_flat(root *root, const char *name) {
    pthread_mutex_lock(&root->lock);
    const flat *found = root->flat;
    while (found != NULL && strcmp(found->dim.name, name) != 0)
        found = found->next;
    pthread_mutex_unlock(&root->lock);
    return found; /* entries stay as long as the root */
}

/* The named dimension of the mesh, or one that was flattened from dimensions of this mesh. */
static const dimension *named(const tutti_mesh *mesh, const char *name) {
    int dim = find_dim(mesh, name);
    if (dim >= 0)
        return &mesh->dims[dim];
    const flat *found = find_flat(mesh->root, name);
    for (int i = 0; found != NULL && i < found->dim.parts; i++) {
        bool inside = false;
        for (int j = 0; j < mesh->dim_count; j++)
            inside = inside || has_part(&mesh->dims[j], found->dim.part[i]);
        if (!inside)
            return NULL;
    }
    return found != NULL ? &found->dim : NULL;
}

static tutti_status pick(const tutti_mesh *mesh, const char *const *names, int count, dimension *dims) {
    for (int i = 0; i < count; i++) {
        if (names[i] == NULL)
            return tu_error(TUTTI_ERROR_ARGUMENT, "name %d of the slice is NULL", i);
        const dimension *dim = named(mesh, names[i]);
        if (dim == NULL)
            return unknown_name(mesh, names[i]);
        for (int j = 0; j < i; j++)
            for (int k = 0; k < dims[j].parts; k++)
                if (has_part(dim, dims[j].part[k]))
                    return tu_error(TUTTI_ERROR_STATE, "the dimensions \"%s\" and \"%s\" of the slice overlap",
                                    dims[j].name, names[i]);
        if (i > 0 && dim->part[0] < dims[i - 1].part[0])
            return tu_error(
                TUTTI_ERROR_NOT_FOUND,
                "the dimensions of a slice must be in the order of the mesh, and \"%s\" comes before \"%s\" there",
                names[i], dims[i - 1].name);
        dims[i] = *dim;
    }
    return TUTTI_OK;
}

tutti_status tutti_mesh_slice(tutti_mesh *mesh, const char *const *names, int count, tutti_mesh **slice) {
    tutti_status status = need_names(mesh);
    if (status != TUTTI_OK)
        return status;
    if (names == NULL || count <= 0 || count > TUTTI_MESH_DIMS || slice == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "a slice needs 1 to %d names, and a place for the result",
                        TUTTI_MESH_DIMS);
    dimension dims[TUTTI_MESH_DIMS];
    status = pick(mesh, names, count, dims);
    if (status != TUTTI_OK)
        return status;
    bool whole = count == mesh->dim_count;
    for (int i = 0; i < count && whole; i++)
        whole = strcmp(dims[i].name, mesh->dims[i].name) == 0;
    if (whole) {
        *slice = tutti_mesh_keep(mesh);
        return TUTTI_OK;
    }
    return make_mesh(mesh->root, dims, count, slice);
}

/* The joined dimension, with its name. */
static tutti_status join(const tutti_mesh *mesh, const char *name, dimension *joined) {
    *joined = (dimension){ .parts = 0 };
    size_t used = 0;
    for (int i = 0; i < mesh->dim_count; i++) {
        for (int j = 0; j < mesh->dims[i].parts; j++)
            joined->part[joined->parts++] = mesh->dims[i].part[j];
        if (used < sizeof joined->name)
            used += (size_t)snprintf(joined->name + used, sizeof joined->name - used, "%s%s", i > 0 ? "_" : "",
                                     mesh->dims[i].name);
    }
    if (name != NULL)
        used = (size_t)snprintf(joined->name, sizeof joined->name, "%s", name);
    if (used == 0 || used >= sizeof joined->name)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "the name of a flattened dimension has 1 to 63 characters; \"%s\" has %zu", joined->name, used);
    return TUTTI_OK;
}

tutti_status tutti_mesh_flatten(tutti_mesh *mesh, const char *name, tutti_mesh **out) {
    if (mesh == NULL || out == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_mesh_flatten needs a mesh, and a place for the result");
    root *root = mesh->root;
    dimension joined;
    tutti_status status = name == NULL ? need_names(mesh) : TUTTI_OK;
    if (status == TUTTI_OK)
        status = join(mesh, name, &joined);
    if (status != TUTTI_OK)
        return status;
    if (mesh->dim_count == 1 && strcmp(mesh->dims[0].name, joined.name) == 0) {
        *out = tutti_mesh_keep(mesh);
        return TUTTI_OK;
    }
    for (int i = 0; i < root->dim_count; i++)
        if (strcmp(root->dims[i].name, joined.name) == 0)
            return tu_error(TUTTI_ERROR_ARGUMENT, "\"%s\" is the name of a dimension of the mesh already", joined.name);
    const flat *known = find_flat(root, joined.name);
    if (known != NULL && !same_layout(root, &known->dim, root, &joined))
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "the mesh was flattened to \"%s\" before, with another layout; choose another name",
                        joined.name);
    if (known != NULL)
        return make_mesh(root, &known->dim, 1, out);
    flat *made = calloc(1, sizeof *made);
    if (made == NULL)
        return tu_error_memory("a flattened mesh", sizeof *made);
    if (mesh->dims[0].group != NULL) {
        char description[64];
        snprintf(description, sizeof description, "mesh_%.58s", joined.name);
        status = make_groups(root, &joined, description);
    }
    if (status == TUTTI_OK)
        status = make_mesh(root, &joined, 1, out);
    if (status != TUTTI_OK) {
        tutti_group_release(joined.group);
        free(made);
        return status;
    }
    made->dim = joined;
    pthread_mutex_lock(&root->lock);
    made->next = root->flat;
    root->flat = made;
    pthread_mutex_unlock(&root->lock);
    return TUTTI_OK;
}
