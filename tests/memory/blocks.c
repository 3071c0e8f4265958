/* SPDX-License-Identifier: Apache-2.0
 *
 * Symmetric blocks: allocating, finding, releasing, persistent ids. Local to a rank: no test here needs a second one.
 */
#include <stdint.h>
#include <sys/resource.h>
#include <tutti/memory.h>
#include <unistd.h>

#include "../harness.h"

static tutti_world *open_alone(void) {
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world));
    return world;
}

static tutti_memory *allocate(tutti_world *world, size_t bytes) {
    tutti_memory *memory;
    CHECK_OK(tutti_memory_alloc(world, bytes, NULL, &memory));
    return memory;
}

static bool all_zero(const void *data, size_t bytes) {
    const unsigned char *at = data;
    for (size_t i = 0; i < bytes; i++)
        if (at[i] != 0)
            return false;
    return true;
}

TEST(a_block_is_zeroed_and_aligned_and_has_a_pad_beside_it) {
    tutti_world *world = open_alone();
    for (size_t bytes = 1; bytes < 3 << 20; bytes = bytes * 5 + 1) {
        tutti_memory *memory = allocate(world, bytes);
        unsigned char *data = tutti_memory_data(memory), *pad = tutti_memory_signal_pad(memory);
        CHECK_EQ((uintptr_t)data % 128, 0);
        CHECK_EQ((uintptr_t)pad % 128, 0);
        CHECK_EQ(tutti_memory_bytes(memory), bytes);
        CHECK_EQ(tutti_memory_pad_bytes(memory), 9216);
        CHECK(pad >= data + bytes);
        CHECK(all_zero(data, bytes) && all_zero(pad, 9216));
        memset(data, 0xff, bytes);
        CHECK(all_zero(pad, 9216));
        memset(pad, 0xff, 9216); /* the whole pad is writable */
        tutti_memory_release(memory);
    }
    CHECK_OK(tutti_world_close(world));
}

TEST(memory_that_was_used_before_is_zeroed_again) {
    tutti_world *world = open_alone();
    for (int round = 0; round < 20; round++) {
        tutti_memory *memory = allocate(world, 5000);
        CHECK(all_zero(tutti_memory_data(memory), 5000));
        CHECK(all_zero(tutti_memory_signal_pad(memory), 9216));
        memset(tutti_memory_data(memory), 0x55, 5000);
        memset(tutti_memory_signal_pad(memory), 0x55, 9216);
        tutti_memory_release(memory);
    }
    CHECK_OK(tutti_world_close(world));
}

TEST(an_alignment_up_to_two_mebibytes_is_kept) {
    tutti_world *world = open_alone();
    for (size_t alignment = 1; alignment <= (size_t)2 << 20; alignment *= 2) {
        tutti_memory_options options = TUTTI_MEMORY_OPTIONS_INIT;
        options.alignment = alignment;
        tutti_memory *memory;
        CHECK_OK(tutti_memory_alloc(world, 100, &options, &memory));
        CHECK_EQ((uintptr_t)tutti_memory_data(memory) % alignment, 0);
        tutti_memory_release(memory);
    }
    CHECK_OK(tutti_world_close(world));
}

TEST(zero_bytes_are_a_block_with_an_address_of_its_own) {
    tutti_world *world = open_alone();
    tutti_memory *one = allocate(world, 0), *two = allocate(world, 0);
    CHECK(tutti_memory_data(one) != NULL && tutti_memory_data(one) != tutti_memory_data(two));
    CHECK_EQ(tutti_memory_bytes(one), 0);
    CHECK(tutti_memory_find(world, tutti_memory_data(one)) == one);
    CHECK(tutti_memory_find(world, tutti_memory_data(two)) == two);
    tutti_memory_release(one);
    tutti_memory_release(two);
    CHECK_OK(tutti_world_close(world));
}

TEST(a_block_of_two_gibibytes_reports_its_size) { /* spec: test_large_alloc */
    if (test_sanitized() || sysconf(_SC_AVPHYS_PAGES) < (long)((3LL << 30) / sysconf(_SC_PAGESIZE)))
        SKIP("needs 3 GiB of free memory and no sanitizer");
    tutti_world *world = open_alone();
    tutti_memory *memory;
    tutti_status status = tutti_memory_alloc(world, (size_t)2 << 30, NULL, &memory);
    if (status == TUTTI_ERROR_MEMORY) {
        CHECK_OK(tutti_world_close(world));
        SKIP("this machine cannot spare 2 GiB now: %s", tutti_error_message());
    }
    CHECK_EQ(status, TUTTI_OK);
    CHECK_EQ(tutti_memory_bytes(memory), 2147483648LL);
    unsigned char *data = tutti_memory_data(memory);
    CHECK(tutti_memory_find(world, data + ((size_t)2 << 30) - 1) == memory);
    CHECK(tutti_memory_find(world, data + ((size_t)2 << 30)) == NULL);
    data[((size_t)2 << 30) - 1] = 1;
    tutti_memory_release(memory);
    CHECK_OK(tutti_world_close(world));
}

TEST(any_pointer_inside_is_found_and_none_outside) {
    enum {
        BLOCKS = 300
    };
    tutti_world *world = open_alone();
    tutti_memory *blocks[BLOCKS];
    int private_word = 0;
    for (int i = 0; i < BLOCKS; i++)
        blocks[i] = allocate(world, (size_t)(i * 37 % 4000) + 1);
    for (int i = 0; i < BLOCKS; i += 3) { /* holes */
        tutti_memory_release(blocks[i]);
        blocks[i] = NULL;
    }
    for (int i = 0; i < BLOCKS; i++) {
        if (blocks[i] == NULL)
            continue;
        char *data = tutti_memory_data(blocks[i]);
        size_t bytes = tutti_memory_bytes(blocks[i]);
        CHECK(tutti_memory_find(world, data) == blocks[i]);
        CHECK(tutti_memory_find(world, data + bytes / 2) == blocks[i]);
        CHECK(tutti_memory_find(world, data + bytes - 1) == blocks[i]);
        CHECK(tutti_memory_find(world, data + bytes) == NULL); /* the pad is no data */
        CHECK(tutti_memory_find(world, tutti_memory_signal_pad(blocks[i])) == NULL);
    }
    CHECK(tutti_memory_find(world, &private_word) == NULL);
    CHECK(tutti_memory_find(world, NULL) == NULL);
    CHECK(tutti_memory_find(NULL, &private_word) == NULL);
    for (int i = 0; i < BLOCKS; i++)
        tutti_memory_release(blocks[i]);
    CHECK_OK(tutti_world_close(world));
}

TEST(a_kept_block_lives_until_its_last_release) {
    tutti_world *world = open_alone();
    tutti_memory *memory = allocate(world, 64);
    char *data = tutti_memory_data(memory);
    CHECK(tutti_memory_keep(memory) == memory);
    tutti_memory_release(memory);
    CHECK(tutti_memory_find(world, data) == memory);
    data[0] = 1;
    tutti_memory_release(memory);
    CHECK(tutti_memory_find(world, data) == NULL);
    tutti_memory_release(NULL);
    CHECK_OK(tutti_world_close(world));
}

/* ---- persistent ids ---- */

static tutti_status persistent(tutti_world *world, size_t bytes, uint64_t id, tutti_memory **memory) {
    return tutti_memory_alloc(world, bytes,
                              TUTTI_OPTIONS(tutti_memory_options, .persistent = true, .persistent_id = id), memory);
}

TEST(a_persistent_id_gets_its_address_and_contents_back) { /* spec: test_empty_strided_p2p_persistent,
                                                              test_symm_mem_empty_storage_reuse */
    tutti_world *world = open_alone();
    tutti_memory *memory, *other;
    CHECK_OK(persistent(world, 8192, 42, &memory));
    char *data = tutti_memory_data(memory);
    strcpy(data, "still here");
    ((uint32_t *)tutti_memory_signal_pad(memory))[7] = 7;
    CHECK_STATUS(persistent(world, 8192, 42, &other), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("still active");
    tutti_memory_release(memory);
    CHECK(tutti_memory_find(world, data) == NULL);
    CHECK_STATUS(persistent(world, 4096, 42, &other), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("8192");
    CHECK_MESSAGE("4096");
    CHECK_OK(persistent(world, 8192, 42, &memory));
    CHECK(tutti_memory_data(memory) == data);
    CHECK_TEXT(data, "still here");
    CHECK_EQ(((uint32_t *)tutti_memory_signal_pad(memory))[7], 7);
    CHECK_OK(persistent(world, 8192, 43, &other)); /* another id is other memory */
    CHECK(tutti_memory_data(other) != data);
    tutti_memory_release(other);
    tutti_memory_release(memory);
    CHECK_OK(tutti_world_close(world));
}

TEST(persistent_ids_belong_to_a_world) {
    tutti_world *one, *two;
    tutti_world_options options = TUTTI_WORLD_OPTIONS_INIT;
    options.name = "one";
    CHECK_OK(tutti_world_open(&options, &one));
    options.name = "two";
    CHECK_OK(tutti_world_open(&options, &two));
    tutti_memory *first, *second;
    CHECK_OK(persistent(one, 100, UINT64_MAX, &first));
    CHECK_OK(persistent(two, 200, UINT64_MAX, &second));
    CHECK(tutti_memory_find(one, tutti_memory_data(second)) == NULL);
    tutti_memory_release(first);
    tutti_memory_release(second);
    CHECK_OK(tutti_world_close(one));
    CHECK_OK(tutti_world_close(two));
}

/* ---- the size of the signal pad ---- */

TEST(the_size_of_the_signal_pad_is_the_worlds_or_the_blocks_own) { /* spec: test_get_signal_pad_size,
                                                                      test_set_signal_pad_size */
    tutti_world *world = open_alone();
    CHECK_EQ(tutti_memory_signal_pad_bytes(world), 9216);
    tutti_memory *before = allocate(world, 16);
    CHECK_OK(tutti_memory_set_signal_pad_bytes(world, (size_t)1 << 20));
    CHECK_EQ(tutti_memory_signal_pad_bytes(world), 1 << 20);
    tutti_memory *after = allocate(world, 16);
    CHECK_EQ(tutti_memory_pad_bytes(after), 1 << 20);
    CHECK(all_zero(tutti_memory_signal_pad(after), (size_t)1 << 20));
    CHECK_EQ(tutti_memory_pad_bytes(before), 9216); /* a block keeps its own */
    CHECK_OK(tutti_memory_set_signal_pad_bytes(world, 0));
    CHECK_EQ(tutti_memory_signal_pad_bytes(world), 9216);
    CHECK_STATUS(tutti_memory_set_signal_pad_bytes(world, 10), TUTTI_ERROR_ARGUMENT);
    tutti_memory *own;
    CHECK_OK(tutti_memory_alloc(world, 16, TUTTI_OPTIONS(tutti_memory_options, .signal_pad_bytes = 64), &own));
    CHECK_EQ(tutti_memory_pad_bytes(own), 64);
    tutti_memory_release(own);
    tutti_memory_release(after);
    tutti_memory_release(before);
    CHECK_OK(tutti_world_close(world));
}

TEST(the_environment_sets_the_size_of_the_signal_pad) {
    setenv("TUTTI_SIGNAL_PAD", "18432", 1);
    tutti_world *world = open_alone();
    CHECK_EQ(tutti_memory_signal_pad_bytes(world), 18432);
    tutti_memory *memory = allocate(world, 1);
    CHECK_EQ(tutti_memory_pad_bytes(memory), 18432);
    tutti_memory_release(memory);
    CHECK_OK(tutti_world_close(world));
}

TEST(a_setting_that_makes_no_sense_is_named) {
    tutti_memory *memory;
    setenv("TUTTI_HUGE_PAGES", "perhaps", 1);
    tutti_world *world = open_alone();
    CHECK_STATUS(tutti_memory_alloc(world, 1, NULL, &memory), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("TUTTI_HUGE_PAGES is \"perhaps\"");
    CHECK_OK(tutti_world_close(world));
    unsetenv("TUTTI_HUGE_PAGES");
    setenv("TUTTI_SIGNAL_PAD", "10", 1);
    world = open_alone();
    CHECK_STATUS(tutti_memory_alloc(world, 1, NULL, &memory), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("TUTTI_SIGNAL_PAD is 10");
    CHECK_OK(tutti_world_close(world));
}

/* ---- bad input ---- */

TEST(wrong_arguments_are_refused_by_name) {
    tutti_world *world = open_alone();
    tutti_memory *memory = NULL;
    CHECK_STATUS(tutti_memory_alloc(NULL, 1, NULL, &memory), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_memory_alloc(world, 1, NULL, NULL), TUTTI_ERROR_ARGUMENT);
    tutti_memory_options options = TUTTI_MEMORY_OPTIONS_INIT;
    options.size = 0;
    CHECK_STATUS(tutti_memory_alloc(world, 1, &options, &memory), TUTTI_ERROR_ARGUMENT);
    options = (tutti_memory_options)TUTTI_MEMORY_OPTIONS_INIT;
    options.alignment = 48;
    CHECK_STATUS(tutti_memory_alloc(world, 1, &options, &memory), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("power of two");
    options.alignment = (size_t)4 << 20;
    CHECK_STATUS(tutti_memory_alloc(world, 1, &options, &memory), TUTTI_ERROR_ARGUMENT);
    options = (tutti_memory_options)TUTTI_MEMORY_OPTIONS_INIT;
    options.signal_pad_bytes = 6;
    CHECK_STATUS(tutti_memory_alloc(world, 1, &options, &memory), TUTTI_ERROR_ARGUMENT);
    options = (tutti_memory_options)TUTTI_MEMORY_OPTIONS_INIT;
    options.huge_pages = (tutti_choice)7;
    CHECK_STATUS(tutti_memory_alloc(world, 1, &options, &memory), TUTTI_ERROR_ARGUMENT);
    options = (tutti_memory_options)TUTTI_MEMORY_OPTIONS_INIT;
    options.device = 99;
    CHECK_STATUS(tutti_memory_alloc(world, 1, &options, &memory), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("does not support device type");
    CHECK(memory == NULL); /* results are written on success only */
    CHECK_OK(tutti_world_close(world));
}

TEST(too_much_memory_is_an_error_code) {
    tutti_world *world = open_alone();
    tutti_memory *memory = NULL;
    CHECK_STATUS(tutti_memory_alloc(world, (size_t)1 << 46, NULL, &memory), TUTTI_ERROR_MEMORY);
    CHECK_STATUS(tutti_memory_alloc(world, SIZE_MAX, NULL, &memory), TUTTI_ERROR_MEMORY);
    CHECK_STATUS(tutti_memory_alloc(world, SIZE_MAX - 100, NULL, &memory), TUTTI_ERROR_MEMORY);
    CHECK(memory == NULL);
    tutti_memory_release(allocate(world, 4096)); /* and the world goes on */
    CHECK_OK(tutti_world_close(world));
}

TEST(a_limit_on_address_space_is_named) {
    if (test_sanitized())
        SKIP("sanitizers need the address space");
    tutti_world *world = open_alone();
    struct rlimit limit = { .rlim_cur = (rlim_t)256 << 20, .rlim_max = (rlim_t)256 << 20 };
    tutti_memory *memory;
    CHECK_EQ(setrlimit(RLIMIT_AS, &limit), 0);
    CHECK_STATUS(tutti_memory_alloc(world, (size_t)512 << 20, NULL, &memory), TUTTI_ERROR_LIMIT);
    CHECK_MESSAGE("RLIMIT_AS");
    tutti_memory_release(allocate(world, 4096));
    CHECK_OK(tutti_world_close(world));
}

static void few_descriptors(void) {
    tutti_world *world = open_alone();
    struct rlimit limit = { .rlim_cur = (rlim_t)test_count_descriptors() + 3, .rlim_max = 4096 };
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    tutti_memory *blocks[64];
    int count = 0;
    tutti_status status = TUTTI_OK;
    while (count < 64 && (status = tutti_memory_alloc(world, (size_t)2 << 20, NULL, &blocks[count])) == TUTTI_OK)
        count++;
    CHECK_EQ(status, TUTTI_ERROR_LIMIT);
    CHECK_MESSAGE("RLIMIT_NOFILE");
    while (count > 0)
        tutti_memory_release(blocks[--count]);
    tutti_memory_release(allocate(world, (size_t)2 << 20));
    CHECK_OK(tutti_world_close(world));
}

TEST(a_limit_on_descriptors_is_named) {
    test_as_ordinary_user(few_descriptors);
}

static tutti_status allocate_and_release(void *argument) {
    (void)argument;
    tutti_world *world;
    tutti_memory *small = NULL, *large = NULL, *kept = NULL;
    tutti_status status = tutti_world_open(NULL, &world);
    if (status != TUTTI_OK)
        return status;
    status = tutti_memory_alloc(world, 100, NULL, &small);
    if (status == TUTTI_OK)
        status = tutti_memory_alloc(world, (size_t)3 << 20, NULL, &large);
    if (status == TUTTI_OK)
        status = persistent(world, 100, 1, &kept);
    tutti_memory_release(small);
    tutti_memory_release(large);
    tutti_memory_release(kept);
    tutti_status closed = tutti_world_close(world);
    return status != TUTTI_OK ? status : closed;
}

TEST(the_nth_failure_of_any_call_in_an_allocation_leaves_nothing_behind) {
    test_fail_each(NULL, allocate_and_release, NULL);
}

/* ---- 32-bit words ---- */

TEST(memset32_sets_exactly_its_words_and_checks_in_order) { /* spec: test_memset32 */
    tutti_world *world = open_alone();
    tutti_memory *memory = allocate(world, 256);
    uint32_t *words = tutti_memory_data(memory);
    tutti_view view = TUTTI_VIEW_INIT, square = TUTTI_VIEW_INIT, floats = TUTTI_VIEW_INIT;
    CHECK_OK(tutti_view_of(words, TUTTI_U32, (int64_t[]){ 64 }, 1, &view));
    CHECK_OK(tutti_view_of(words, TUTTI_U32, (int64_t[]){ 8, 8 }, 2, &square));
    CHECK_OK(tutti_view_of(words, TUTTI_F32, (int64_t[]){ 64 }, 1, &floats));
    CHECK_OK(tutti_view_memset32(world, &view, 32, 1, 16, NULL));
    for (int i = 0; i < 64; i++)
        CHECK_EQ(words[i], i >= 32 && i < 48);
    CHECK_STATUS(tutti_view_memset32(world, &square, -1, -1, 0, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("input must be a flat, contiguous uint32 tensor");
    CHECK_STATUS(tutti_view_memset32(world, &floats, -1, -1, 0, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("input must be a flat, contiguous uint32 tensor");
    tutti_view strided = view;
    strided.shape[0] = 32;
    strided.strides[0] = 2;
    CHECK_STATUS(tutti_view_memset32(world, &strided, 0, 1, 1, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("contiguous");
    CHECK_STATUS(tutti_view_memset32(world, &view, -1, -1, 0, NULL), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("offset must be greater than or equal to 0");
    CHECK_STATUS(tutti_view_memset32(world, &view, 0, -1, 0, NULL), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("count must be a positive integer");
    CHECK_STATUS(tutti_view_memset32(world, &view, 0, -1, 65, NULL), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("val must be in the range of");
    CHECK_STATUS(tutti_view_memset32(world, &view, 0, 4294967296, 1, NULL), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("(uint32_t)");
    CHECK_STATUS(tutti_view_memset32(world, &view, 0, 1, 65, NULL), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("exceeded the numel of the input (64)");
    CHECK_STATUS(tutti_view_memset32(world, &view, 64, 1, 1, NULL), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_view_memset32(world, &view, 1, 1, INT64_MAX, NULL), TUTTI_ERROR_RANGE);
    CHECK_OK(tutti_view_memset32(world, &view, 0, 4294967295, 64, NULL));
    CHECK_OK(tutti_view_memset32(world, &view, 63, 5, 1, NULL));
    CHECK_EQ(words[0], 4294967295);
    CHECK_EQ(words[63], 5);
    tutti_memory_release(memory);
    CHECK_OK(tutti_world_close(world));
}

TEST(write_value32_writes_one_word_and_checks) { /* spec: test_stream_write_value32 */
    tutti_world *world = open_alone();
    uint32_t words[4] = { 0 };
    tutti_view view = TUTTI_VIEW_INIT;
    CHECK_OK(tutti_view_of(words, TUTTI_U32, (int64_t[]){ 4 }, 1, &view));
    for (int i = 0; i < 4; i++) {
        CHECK_OK(tutti_view_write_value32(world, &view, i, 1, NULL));
        for (int j = 0; j < 4; j++)
            CHECK_EQ(words[j], j <= i);
    }
    CHECK_STATUS(tutti_view_write_value32(world, &view, -1, 1, NULL), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_view_write_value32(world, &view, 0, 4294967296, NULL), TUTTI_ERROR_RANGE);
    CHECK_STATUS(tutti_view_write_value32(world, &view, 4, 1, NULL), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("offset (4) exceeded the numel");
    CHECK_OK(tutti_world_close(world));
}

/* ---- the rest ---- */

TEST(the_cpu_has_no_multicast_and_asking_never_fails) { /* spec: test_has_multicast_support */
    tutti_world *world = open_alone();
    tutti_error_clear();
    CHECK(!tutti_memory_has_multicast_support(world, TUTTI_CPU));
    CHECK(!tutti_memory_has_multicast_support(world, TUTTI_CUDA_AT(99)));
    CHECK(!tutti_memory_has_multicast_support(world, 77));
    CHECK(!tutti_memory_has_multicast_support(NULL, TUTTI_CPU));
    CHECK_TEXT(tutti_error_message(), "");
    CHECK_OK(tutti_world_close(world));
}

TEST(a_fake_world_has_memory_of_its_own_and_no_peers_memory) {
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(3, 8, NULL, &world));
    tutti_memory *memory = allocate(world, 1000);
    CHECK(all_zero(tutti_memory_data(memory), 1000));
    CHECK(tutti_memory_find(world, tutti_memory_data(memory)) == memory);
    tutti_memory_release(memory);
    CHECK_OK(tutti_world_close(world));
}
