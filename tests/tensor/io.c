/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors in files: what is saved comes back, files appear whole or not at all, and damage of any kind is an error with
 * a reason.
 */
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <dirent.h>
#include <tutti/autograd.h>
#include <tutti/io.h>
#include <tutti/ops.h>

#include "../harness.h"

/* ---- a folder of the test's own ---- */

static char folder[64];

static const char *in_folder(const char *name) {
    static char paths[4][128];
    static int next;
    if (folder[0] == 0) {
        snprintf(folder, sizeof folder, "/tmp/tutti-io-XXXXXX");
        CHECK(mkdtemp(folder) != NULL);
    }
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static int count_files(void) {
    int files = 0;
    DIR *list = opendir(folder);
    CHECK(list != NULL);
    for (struct dirent *entry; (entry = readdir(list)) != NULL;)
        files += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
    closedir(list);
    return files;
}

static void remove_folder(void) {
    if (folder[0] == 0)
        return;
    DIR *list = opendir(folder);
    for (struct dirent *entry; list != NULL && (entry = readdir(list)) != NULL;) {
        char path[400];
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (unlink(path) != 0)
            rmdir(path);
    }
    if (list != NULL)
        closedir(list);
    rmdir(folder);
}

static void write_bytes(const char *path, const void *bytes, size_t count) {
    FILE *file = fopen(path, "we");
    CHECK(file != NULL && fwrite(bytes, 1, count, file) == count);
    CHECK_EQ(fclose(file), 0);
}

static size_t read_bytes(const char *path, char *bytes, size_t room) {
    FILE *file = fopen(path, "re");
    CHECK(file != NULL);
    size_t count = fread(bytes, 1, room, file);
    fclose(file);
    return count;
}

static void nothing_left(void) {
    tt_counts counts = { .size = sizeof counts };
    CHECK_OK(tt_count(&counts));
    CHECK_EQ(counts.tensors, 0);
    CHECK_EQ(counts.storages, 0);
    CHECK_EQ(counts.scopes, 0);
}

/* The pending error is this one, and is cleared. */
static void check_error(tutti_status status, const char *fragment) {
    tutti_status shown = tt_error_show();
    if (shown != status || strstr(tutti_error_message(), fragment) == NULL)
        FAIL("%s: \"%s\", and not %s with \"%s\"", tutti_status_name(shown),
             shown == TUTTI_OK ? "" : tutti_error_message(), tutti_status_name(status), fragment);
    tt_error_clear();
}

static tt_tensor *sample(tutti_dtype dtype) {
    return tt_to(tt_view(tt_arange(0, 6, 1, TUTTI_F32, NULL), tt_shape(2, 3)), dtype);
}

/* ---- .npy ---- */

TEST(every_dtype_that_numpy_has_comes_back_from_npy) {
    for (int dtype = TUTTI_F64; dtype <= TUTTI_C128; dtype++) {
        tt_scope scope = tt_scope_open();
        const char *path = in_folder("x.npy");
        bool has = dtype != TUTTI_BF16 && dtype != TUTTI_F8_E4M3 && dtype != TUTTI_F8_E5M2;
        tt_tensor *x = sample((tutti_dtype)dtype);
        CHECK(tt_save_npy(x, path) == has);
        if (has) {
            tt_tensor *y = tt_load_npy(path);
            CHECK(y != NULL && tt_dtype(y) == (tutti_dtype)dtype && tt_equal(x, y));
        } else {
            check_error(TUTTI_ERROR_TYPE, "tt_save_safetensors");
        }
        CHECK_OK(tt_scope_close(&scope));
    }
    CHECK_EQ(count_files(), 1);
    remove_folder();
    nothing_left();
}

TEST(any_shape_and_any_strides_come_back_from_npy) {
    tt_scope scope = tt_scope_open();
    const char *path = in_folder("x.npy");
    tt_tensor *base = tt_arange(0, 120, 1, TUTTI_F32, NULL);
    tt_tensor *shapes[] = { tt_full(tt_shape(), 7, TUTTI_F32, NULL),
                            tt_zeros(tt_shape(0), TUTTI_F32, NULL),
                            tt_zeros(tt_shape(3, 0, 5), TUTTI_F32, NULL),
                            base,
                            tt_view(base, tt_shape(1, 2, 1, 3, 1, 4, 5, 1)),
                            tt_transpose(tt_view(base, tt_shape(10, 12)), 0, 1),
                            tt_narrow(tt_view(base, tt_shape(10, 12)), 1, 3, 5),
                            tt_expand(tt_ones(tt_shape(1, 4), TUTTI_F32, NULL), tt_shape(3, 4)) };
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        CHECK(tt_save_npy(shapes[i], path));
        tt_tensor *y = tt_load_npy(path);
        CHECK(y != NULL && tt_equal(shapes[i], y));
    }
    CHECK_OK(tt_scope_close(&scope));
    remove_folder();
    nothing_left();
}

TEST(the_bytes_of_a_npy_file_are_those_of_the_format) {
    tt_scope scope = tt_scope_open();
    char bytes[256];
    uint8_t flags[3] = { 0, 2, 255 }; /* true is any byte in memory, and 1 in a file */
    CHECK(tt_save_npy(tt_from(flags, tt_shape(3), TUTTI_BOOL, NULL), in_folder("x.npy")));
    CHECK_EQ(read_bytes(in_folder("x.npy"), bytes, sizeof bytes), 131);
    CHECK(memcmp(bytes, "\x93NUMPY\1\0\x76\0{'descr': '|b1', 'fortran_order': False, 'shape': (3,), } ", 66) == 0);
    CHECK(memcmp(bytes + 127, "\n\0\1\1", 4) == 0);
    CHECK_OK(tt_scope_close(&scope));
    remove_folder();
}

/* A .npy of `version` with this header text and data. */
static tt_tensor *load_made(int version, const char *header, const void *data, size_t data_bytes) {
    char file[1024] = "\x93NUMPY";
    size_t length = strlen(header), prefix = version == 1 ? 10 : 12;
    file[6] = (char)version;
    file[8] = (char)length;
    file[9] = (char)(length >> 8);
    memcpy(file + prefix, header, length);
    memcpy(file + prefix + length, data, data_bytes);
    write_bytes(in_folder("made.npy"), file, prefix + length + data_bytes);
    return tt_load_npy(in_folder("made.npy"));
}

TEST(other_versions_orders_and_byte_orders_are_read) {
    tt_scope scope = tt_scope_open();
    static const uint8_t big[] = { 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 1, 0 };
    tt_tensor *x = load_made(2, "{\"shape\": (2L, 3), 'fortran_order':True,'descr':'>i2'}\n", big, sizeof big);
    CHECK(x != NULL && tt_at(x, tt_shape(0, 0)) == 1 && tt_at(x, tt_shape(1, 0)) == 2 &&
          tt_at(x, tt_shape(1, 2)) == 256);
    CHECK_EQ(tt_stride(x, 0), 1);
    static const uint8_t complex_big[] = { 0x3f, 0x80, 0, 0, 0x40, 0, 0, 0 };
    tt_tensor *c = load_made(3, "{'descr': '>c8', 'fortran_order': False, 'shape': ()}", complex_big, 8);
    float parts[2];
    CHECK(c != NULL && tt_read(c, parts, TUTTI_C64, 1) && parts[0] == 1 && parts[1] == 2);
    /* What follows is another array's. */
    x = load_made(1, "{'descr': '|u1', 'fortran_order': False, 'shape': (2,)}", "\1\2\3", 3);
    CHECK(x != NULL && tt_numel(x) == 2 && tt_at(x, tt_shape(1)) == 2);
    CHECK_OK(tt_scope_close(&scope));
    remove_folder();
    nothing_left();
}

TEST(a_damaged_npy_file_is_an_error_that_says_what) {
    static const struct {
        int version;
        const char *header;
        tutti_status status;
        const char *fragment;
    } cases[] = {
        { 9, "{}", TUTTI_ERROR_UNSUPPORTED, "version 9.0" },
        { 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }", TUTTI_ERROR_PROTOCOL, "needs 12 bytes" },
        { 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (999999999999, 999999999999), }", TUTTI_ERROR_PROTOCOL,
          "more than" },
        { 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,), }", TUTTI_ERROR_PROTOCOL,
          "too large" },
        { 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }", TUTTI_ERROR_PROTOCOL, "a size" },
        { 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1,1,1), }", TUTTI_ERROR_UNSUPPORTED,
          "8 dimensions" },
        { 1, "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", TUTTI_ERROR_TYPE, "pickled" },
        { 1, "{'descr': '<V2', 'fortran_order': False, 'shape': (1,), }", TUTTI_ERROR_TYPE, "bf16" },
        { 1, "{'descr': '<U4', 'fortran_order': False, 'shape': (1,), }", TUTTI_ERROR_TYPE, "<U4" },
        { 1, "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }", TUTTI_ERROR_TYPE, "fields" },
        { 1, "{'descr': '<f4', 'shape': (1,), }", TUTTI_ERROR_PROTOCOL, "fortran_order" },
        { 1, "{'descr': '<f4', 'descr': '<f4', 'shape': (1,), }", TUTTI_ERROR_PROTOCOL, "twice" },
        { 1, "{'descr': '<f4', 'fortran_order': Maybe, 'shape': (1,), }", TUTTI_ERROR_PROTOCOL, "True or False" },
        { 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'x': 1}", TUTTI_ERROR_PROTOCOL, "unknown" },
        { 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (1,", TUTTI_ERROR_PROTOCOL, "a size" },
        { 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), } import os", TUTTI_ERROR_PROTOCOL,
          "nothing more" },
        { 1, "", TUTTI_ERROR_PROTOCOL, "dictionary" },
    };
    tt_scope scope = tt_scope_open();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        CHECK(load_made(cases[i].version, cases[i].header, "\0\0\0\0", 4) == NULL);
        check_error(cases[i].status, cases[i].fragment);
    }
    write_bytes(in_folder("made.npy"), "\x93NUMPY\1\0\xff\xff{", 11);
    CHECK(tt_load_npy(in_folder("made.npy")) == NULL);
    check_error(TUTTI_ERROR_PROTOCOL, "65535 bytes long");
    write_bytes(in_folder("made.npy"), "", 0);
    CHECK(tt_load_npy(in_folder("made.npy")) == NULL);
    check_error(TUTTI_ERROR_PROTOCOL, "signature");
    CHECK_OK(tt_scope_close(&scope));
    remove_folder();
    nothing_left();
}

/* ---- .npz ---- */

TEST(named_tensors_come_back_from_npz_in_their_order) {
    tt_scope scope = tt_scope_open();
    const char *names[] = { "b", "layer/0.weight", "größe", "empty" };
    tt_tensor *tensors[] = { sample(TUTTI_F64), tt_transpose(sample(TUTTI_I16), 0, 1), sample(TUTTI_BOOL),
                             tt_zeros(tt_shape(0, 2), TUTTI_U8, NULL) };
    CHECK(tt_save_npz(tt_tensors_of(4, tensors), names, in_folder("x.npz")));
    tt_named_list list = tt_load_npz(in_folder("x.npz"));
    CHECK_EQ(list.count, 4);
    for (int i = 0; i < 4; i++) {
        CHECK_TEXT(list.names[i], names[i]);
        CHECK(tt_equal(tensors[i], tt_named(list, names[i])));
    }
    CHECK(tt_named(list, "c") == NULL);
    check_error(TUTTI_ERROR_NOT_FOUND, "\"b\", \"layer/0.weight\"");
    CHECK(tt_save_npz(tt_tensors_of(0, NULL), NULL, in_folder("x.npz")));
    CHECK_EQ(tt_load_npz(in_folder("x.npz")).count, 0);
    CHECK_OK(tt_scope_close(&scope));
    remove_folder();
    nothing_left();
}

TEST(more_entries_than_16_bits_count_come_back_from_npz) {
    enum {
        COUNT = 66000
    };
    tt_scope scope = tt_scope_open();
    tt_tensor *x = sample(TUTTI_U8), **tensors = malloc(COUNT * sizeof *tensors);
    const char **names = malloc(COUNT * sizeof *names);
    char(*text)[8] = malloc(COUNT * sizeof *text);
    for (int i = 0; i < COUNT; i++) {
        snprintf(text[i], sizeof text[i], "%d", i);
        names[i] = text[i];
        tensors[i] = x;
    }
    CHECK(tt_save_npz(tt_tensors_of(COUNT, tensors), names, in_folder("x.npz")));
    tt_named_list list = tt_load_npz(in_folder("x.npz"));
    CHECK_EQ(list.count, COUNT);
    CHECK_TEXT(list.names[COUNT - 1], "65999");
    CHECK(tt_equal(x, list.at[COUNT - 1]));
    CHECK_OK(tt_scope_close(&scope));
    free(tensors);
    free(names);
    free(text);
    remove_folder();
    nothing_left();
}

TEST(a_damaged_npz_file_is_an_error_that_says_what) {
    tt_scope scope = tt_scope_open();
    static char good[2048], bytes[2048];
    CHECK(tt_save_npz(tt_tensors(sample(TUTTI_F32)), (const char *[]){ "x" }, in_folder("x.npz")));
    size_t size = read_bytes(in_folder("x.npz"), good, sizeof good), end = size - 22, central = end - 46 - 5;
    static const struct {
        tutti_status status;
        const char *fragment;
    } expected[] = { { TUTTI_ERROR_PROTOCOL, "checksum" },     { TUTTI_ERROR_UNSUPPORTED, "deflate" },
                     { TUTTI_ERROR_UNSUPPORTED, "encrypted" }, { TUTTI_ERROR_PROTOCOL, "no zip archive" },
                     { TUTTI_ERROR_PROTOCOL, "two lengths" },  { TUTTI_ERROR_PROTOCOL, "past its end" },
                     { TUTTI_ERROR_PROTOCOL, "too short" },    { TUTTI_ERROR_PROTOCOL, "not where" },
                     { TUTTI_ERROR_UNSUPPORTED, "no .npy" },   { TUTTI_ERROR_PROTOCOL, "signature" },
                     { TUTTI_ERROR_PROTOCOL, "past its end" }, { TUTTI_ERROR_PROTOCOL, "follow its elements" } };
    for (int i = 0; i < (int)(sizeof expected / sizeof expected[0]); i++) {
        memcpy(bytes, good, size);
        size_t now = size;
        switch (i) {
        case 0:
            bytes[central - 1] ^= 1;
            break; /* the last element */
        case 1:
            bytes[central + 10] = 8;
            break; /* the method */
        case 2:
            bytes[central + 8] = 1;
            break; /* the flags */
        case 3:
            now -= 1;
            break;
        case 4:
            bytes[central + 20]++;
            break; /* one of the sizes */
        case 5:
            bytes[end + 16] = (char)0xff, bytes[end + 17] = 0x7f;
            break; /* where the directory is */
        case 6:
            bytes[end + 8] = bytes[end + 10] = 9;
            break; /* how many entries it has */
        case 7:
            bytes[central + 42] = 1;
            break; /* where the entry is */
        case 8:
            bytes[end - 1] = 'z';
            break; /* its name */
        case 9:
            bytes[30 + 5] = 'x';
            break; /* its contents */
        case 10:
            bytes[central + 22] = bytes[central + 26] = 1;
            break; /* both sizes */
        default:
            bytes[central + 20] += 3, bytes[central + 24] += 3;
            break;
        }
        write_bytes(in_folder("bad.npz"), bytes, now);
        CHECK_EQ(tt_load_npz(in_folder("bad.npz")).count, 0);
        check_error(expected[i].status, expected[i].fragment);
    }
    CHECK_OK(tt_scope_close(&scope));
    remove_folder();
    nothing_left();
}

/* ---- safetensors ---- */

TEST(every_dtype_but_c128_comes_back_from_safetensors) {
    tt_scope scope = tt_scope_open();
    tt_tensor *tensors[TUTTI_C64];
    const char *names[TUTTI_C64];
    for (int dtype = TUTTI_F64; dtype <= TUTTI_C64; dtype++) {
        tensors[dtype - 1] = dtype % 2 ? sample((tutti_dtype)dtype) : tt_transpose(sample((tutti_dtype)dtype), 0, 1);
        names[dtype - 1] = tutti_dtype_name((tutti_dtype)dtype);
    }
    CHECK(tt_save_safetensors(tt_tensors_of(TUTTI_C64, tensors), names, in_folder("x.safetensors")));
    tt_named_list list = tt_load_safetensors(in_folder("x.safetensors"));
    CHECK_EQ(list.count, TUTTI_C64);
    for (size_t i = 0; i < list.count; i++) {
        CHECK_TEXT(list.names[i], names[i]);
        CHECK_EQ(tt_dtype(list.at[i]), tt_dtype(tensors[i]));
        CHECK(tt_equal(list.at[i], tensors[i]));
    }
    CHECK(!tt_save_safetensors(tt_tensors(sample(TUTTI_C128)), names, in_folder("y.safetensors")));
    check_error(TUTTI_ERROR_TYPE, "tt_save_npz");
    CHECK_EQ(tt_load_metadata(in_folder("x.safetensors")).count, 0);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_EQ(count_files(), 1);
    remove_folder();
    nothing_left();
}

TEST(metadata_and_odd_names_come_back_from_safetensors) {
    tt_scope scope = tt_scope_open();
    const char *names[] = { "a \"quoted\" \\ name\n", "größe \xf0\x9f\x8e\xb5" }, *keys[] = { "format", "note" },
               *values[] = { "pt", "tab\tend" };
    CHECK(tt_save_safetensors_with(
        tt_tensors(tt_full(tt_shape(), 3, TUTTI_BF16, NULL), tt_zeros(tt_shape(0, 4), TUTTI_F8_E4M3, NULL)), names,
        (tt_metadata){ 2, keys, values }, in_folder("x.safetensors")));
    tt_named_list list = tt_load_safetensors(in_folder("x.safetensors"));
    CHECK_EQ(list.count, 2);
    CHECK(tt_item(tt_named(list, names[0])) == 3 && tt_size(tt_named(list, names[1]), 1) == 4);
    tt_metadata metadata = tt_load_metadata(in_folder("x.safetensors"));
    CHECK_EQ(metadata.count, 2);
    CHECK_TEXT(tt_metadata_get(metadata, "format"), "pt");
    CHECK_TEXT(tt_metadata_get(metadata, "note"), "tab\tend");
    CHECK(tt_metadata_get(metadata, "other") == NULL);
    CHECK_OK(tt_scope_close(&scope));
    remove_folder();
    nothing_left();
}

static tt_named_list load_safe(const char *json, size_t data_bytes) {
    char file[1024] = { 0 };
    size_t length = strlen(json);
    file[0] = (char)length;
    file[1] = (char)(length >> 8);
    memcpy(file + 8, json, length);
    write_bytes(in_folder("made.safetensors"), file, 8 + length + data_bytes);
    return tt_load_safetensors(in_folder("made.safetensors"));
}

TEST(json_of_other_writers_is_read) {
    tt_scope scope = tt_scope_open();
    tt_named_list list = load_safe(
        "{ \"\\u00e9\\ud83c\\udfb5\\/\" : {\"data_offsets\":[ 0 , 4 ],\n\"shape\" : [2,2], \"dtype\":\"U8\" } }   ", 4);
    CHECK_EQ(list.count, 1);
    CHECK_TEXT(list.names[0], "\xc3\xa9\xf0\x9f\x8e\xb5/");
    CHECK_EQ(load_safe("{}", 0).count, 0);
    CHECK_EQ(load_safe("{\"__metadata__\":{}}", 0).count, 0);
    CHECK_OK(tt_scope_close(&scope));
    remove_folder();
    nothing_left();
}

TEST(a_damaged_safetensors_file_is_an_error_that_says_what) {
    static const struct {
        const char *json;
        tutti_status status;
        const char *fragment;
    } cases[] = {
        { "[]", TUTTI_ERROR_PROTOCOL, "{ is expected" },
        { "", TUTTI_ERROR_PROTOCOL, "{ is expected" },
        { "{\"a\"", TUTTI_ERROR_PROTOCOL, "a colon" },
        { "{\"a", TUTTI_ERROR_PROTOCOL, "an end" },
        { "{\"a\\u0000\":1}", TUTTI_ERROR_PROTOCOL, "proper character" },
        { "{\"a\\ud800\":1}", TUTTI_ERROR_PROTOCOL, "proper character" },
        { "{\"a\xff\":1}", TUTTI_ERROR_PROTOCOL, "UTF-8" },
        { "{\"a\":1}", TUTTI_ERROR_PROTOCOL, "description of a tensor" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[4]}}", TUTTI_ERROR_PROTOCOL, "dtype, shape and data_offsets" },
        { "{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\"}}", TUTTI_ERROR_PROTOCOL, "each once" },
        { "{\"a\":{\"dtype\":\"F4\",\"shape\":[4],\"data_offsets\":[0,4]}}", TUTTI_ERROR_TYPE, "\"F4\"" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[5],\"data_offsets\":[0,5]}}", TUTTI_ERROR_PROTOCOL,
          "[0, 5) of 4 bytes" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,4]}}", TUTTI_ERROR_PROTOCOL,
          "4 bytes for a shape that needs 3" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]}}", TUTTI_ERROR_PROTOCOL, "leave bytes out" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,0]}}", TUTTI_ERROR_PROTOCOL, "[4, 0)" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[-4],\"data_offsets\":[0,4]}}", TUTTI_ERROR_PROTOCOL, "without sign" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4,4]}}", TUTTI_ERROR_PROTOCOL,
          "two data_offsets" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,4],\"data_offsets\":[0,4]}}", TUTTI_ERROR_UNSUPPORTED,
          "9 dimensions" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[400000000000000000,400000000000000000],\"data_offsets\":[0,4]}}",
          TUTTI_ERROR_PROTOCOL, "more than" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_"
          "offsets\":[0,4]}}",
          TUTTI_ERROR_PROTOCOL, "overlap" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_"
          "offsets\":[4,4]}}",
          TUTTI_ERROR_EXISTS, "\"a\" occurs twice" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}} x", TUTTI_ERROR_PROTOCOL, "nothing more" },
        { "{\"__metadata__\":{\"a\":1}}", TUTTI_ERROR_PROTOCOL, "a string" },
    };
    tt_scope scope = tt_scope_open();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        CHECK_EQ(load_safe(cases[i].json, 4).count, 0);
        check_error(cases[i].status, cases[i].fragment);
    }
    write_bytes(in_folder("made.safetensors"), "\xff\xff\xff\xff\xff\xff\xff\xff{}", 10);
    CHECK_EQ(tt_load_safetensors(in_folder("made.safetensors")).count, 0);
    check_error(TUTTI_ERROR_PROTOCOL, "more than follow");
    write_bytes(in_folder("made.safetensors"), "abc", 3);
    CHECK_EQ(tt_load_safetensors(in_folder("made.safetensors")).count, 0);
    check_error(TUTTI_ERROR_PROTOCOL, "3 bytes");
    CHECK_OK(tt_scope_close(&scope));
    remove_folder();
    nothing_left();
}

/* ---- files ---- */

TEST(wrong_arguments_and_paths_name_the_culprit) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = sample(TUTTI_F32);
    const char *twice[] = { "a", "a" }, *null[] = { "a", NULL }, *empty[] = { "a", "" }, *latin[] = { "a", "\xe4" },
               *own[] = { "a", "__metadata__" };
    tt_tensor_list two = tt_tensors(x, x);
    CHECK(!tt_save_npz(two, twice, in_folder("x")));
    check_error(TUTTI_ERROR_EXISTS, "\"a\" occurs twice");
    CHECK(!tt_save_npz(two, null, in_folder("x")));
    check_error(TUTTI_ERROR_ARGUMENT, "names[1] is NULL");
    CHECK(!tt_save_safetensors(two, empty, in_folder("x")));
    check_error(TUTTI_ERROR_ARGUMENT, "names[1] is empty");
    CHECK(!tt_save_safetensors(two, latin, in_folder("x")));
    check_error(TUTTI_ERROR_ARGUMENT, "names[1] is not UTF-8");
    CHECK(!tt_save_safetensors(two, own, in_folder("x")));
    check_error(TUTTI_ERROR_ARGUMENT, "__metadata__");
    CHECK(!tt_save_npz(two, NULL, in_folder("x")));
    check_error(TUTTI_ERROR_ARGUMENT, "names is NULL");
    CHECK(!tt_save_npz(tt_tensors(x, NULL), own, in_folder("x")));
    check_error(TUTTI_ERROR_ARGUMENT, "tensors[1] is NULL");
    tt_options options = TT_OPTIONS_INIT;
    options.device = TUTTI_META;
    CHECK(!tt_save_npy(tt_zeros(tt_shape(2), TUTTI_F32, &options), in_folder("x")));
    check_error(TUTTI_ERROR_UNSUPPORTED, "no data");
    CHECK(!tt_save_npy(x, NULL));
    check_error(TUTTI_ERROR_ARGUMENT, "path is NULL");
    CHECK(!tt_save_npy(x, in_folder("no/such/folder")));
    check_error(TUTTI_ERROR_SYSTEM, "No such file");
    CHECK(!tt_save_npy(x, folder));
    check_error(TUTTI_ERROR_ARGUMENT, "a folder");
    CHECK(!tt_save_npy(x, "/dev/full"));
    check_error(TUTTI_ERROR_ARGUMENT, "a device");
    CHECK(tt_load_npy(in_folder("nothing")) == NULL);
    check_error(TUTTI_ERROR_SYSTEM, "nothing");
    CHECK(tt_load_npy(folder) == NULL);
    check_error(TUTTI_ERROR_ARGUMENT, "a folder");
    CHECK_EQ(mkfifo(in_folder("pipe"), 0600), 0);
    CHECK_EQ(tt_load_npz(in_folder("pipe")).count, 0); /* and does not wait for a writer */
    check_error(TUTTI_ERROR_ARGUMENT, "pipe");
    unlink(in_folder("pipe"));
    CHECK_OK(tt_scope_close(&scope));
    CHECK_EQ(count_files(), 0);
    CHECK(tt_load_npy(in_folder("x")) == NULL);
    check_error(TUTTI_ERROR_SCOPE, "no scope is open");
    remove_folder();
    nothing_left();
}

TEST(a_file_keeps_its_permissions_and_a_link_stays_a_link) {
    tt_scope scope = tt_scope_open();
    struct stat about;
    write_bytes(in_folder("real"), "old", 3);
    CHECK_EQ(chmod(in_folder("real"), 0640), 0);
    CHECK_EQ(symlink("real", in_folder("link")), 0);
    CHECK(tt_save_npy(sample(TUTTI_F32), in_folder("link")));
    CHECK(lstat(in_folder("link"), &about) == 0 && S_ISLNK(about.st_mode));
    CHECK(stat(in_folder("real"), &about) == 0 && (about.st_mode & 0777) == 0640);
    CHECK(tt_load_npy(in_folder("real")) != NULL);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_EQ(count_files(), 2);
    remove_folder();
}

/* A limit on the size of files stands for the full disk: writing fails in the middle in the same way. */
TEST(a_disk_that_fills_up_leaves_the_old_file_and_nothing_else) {
    tt_scope scope = tt_scope_open();
    tt_tensor *small = sample(TUTTI_F32), *large = tt_ones(tt_shape(1 << 20), TUTTI_F32, NULL);
    CHECK(tt_save_npy(small, in_folder("x")));
    struct rlimit limit = { 1 << 20, 1 << 20 };
    signal(SIGXFSZ, SIG_IGN);
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    for (int i = 0; i < 3; i++) {
        if (i == 0)
            CHECK(!tt_save_npy(large, in_folder("x")));
        else if (i == 1)
            CHECK(!tt_save_npz(tt_tensors(small, large), (const char *[]){ "a", "b" }, in_folder("x")));
        else
            CHECK(!tt_save_safetensors(tt_tensors(small, large), (const char *[]){ "a", "b" }, in_folder("x")));
        check_error(TUTTI_ERROR_SYSTEM, "left as it was");
        CHECK_EQ(count_files(), 1);
        CHECK(tt_equal(small, tt_load_npy(in_folder("x"))));
    }
    CHECK_OK(tt_scope_close(&scope));
    remove_folder();
    nothing_left();
}

static void write_over_a_protected_file(void) {
    tt_scope scope = tt_scope_open();
    CHECK(!tt_save_npy(sample(TUTTI_F32), in_folder("protected")));
    check_error(TUTTI_ERROR_SYSTEM, "may not be written");
    CHECK_OK(tt_scope_close(&scope));
}

TEST(a_file_that_may_not_be_written_is_not_replaced) {
    write_bytes(in_folder("protected"), "old", 3);
    CHECK_EQ(chmod(in_folder("protected"), 0444), 0);
    CHECK_EQ(chmod(folder, 0777), 0);
    test_as_ordinary_user(write_over_a_protected_file);
    CHECK_EQ(count_files(), 1);
    remove_folder();
}

static tutti_status save_and_load(void *argument) {
    (void)argument;
    tt_scope scope = tt_scope_open();
    if (scope.id == 0) {
        tutti_status status = tt_error_show();
        tt_error_clear();
        return status;
    }
    const char *names[] = { "a", "b" };
    tt_tensor *a = sample(TUTTI_F32), *b = tt_transpose(a, 0, 1);
    tt_save_npy(b, in_folder("f.npy"));
    tt_load_npy(in_folder("f.npy"));
    tt_save_npz(tt_tensors(a, b), names, in_folder("f.npz"));
    tt_load_npz(in_folder("f.npz"));
    tt_save_safetensors_with(tt_tensors(a, b), names, (tt_metadata){ 2, names, names }, in_folder("f.safetensors"));
    tt_load_safetensors(in_folder("f.safetensors"));
    tt_load_metadata(in_folder("f.safetensors"));
    tutti_status status = tt_scope_close(&scope);
    DIR *list = opendir(folder);
    for (struct dirent *entry; (entry = readdir(list)) != NULL;)
        CHECK(strncmp(entry->d_name, ".tutti", 6) != 0);
    closedir(list);
    tt_memory_trim();
    nothing_left();
    return status;
}

TEST(a_failing_allocation_leaves_neither_memory_nor_files_behind) {
    in_folder("made before");
    test_fail_each("malloc,calloc,realloc,strdup,aligned_alloc", save_and_load, NULL);
    remove_folder();
}
