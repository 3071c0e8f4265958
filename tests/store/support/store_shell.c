/* SPDX-License-Identifier: Apache-2.0
 *
 * A store by hand: reads one operation per line from standard input and writes one line of result, "ok …" or "error
 * STATUS message".
 *
 *     store_shell server | client PORT | file PATH WORKERS
 *     set KEY VALUE, get KEY MS, add KEY N, compare_set KEY EXPECTED DESIRED, check KEY…, wait MS KEY…, delete KEY,
 * num_keys, list_keys, append KEY VALUE, multi_get KEY…, multi_set KEY VALUE KEY VALUE…, push KEY VALUE, pop KEY MS (0:
 * do not wait), length KEY, barrier KEY COUNT MS          ("~" stands for an empty text)
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tutti/store.h>

enum {
    WORDS = 64
};
#define NANOSECONDS(milliseconds) (strtoll(milliseconds, NULL, 10) * 1000000)

static void report(tutti_status status, const char *text) {
    if (status == TUTTI_OK)
        printf("ok %s\n", text);
    else
        printf("error %s %s\n", tutti_status_name(status), tutti_error_message());
    fflush(stdout);
}

static void report_value(tutti_status status, void *value) {
    report(status, value);
    if (status == TUTTI_OK)
        tutti_free(value);
}

static void report_number(tutti_status status, int64_t number) {
    char text[32];
    snprintf(text, sizeof text, "%" PRId64, number);
    report(status, text);
}

static const char *text_of(const char *word) {
    return strcmp(word, "~") == 0 ? "" : word;
}

static void list_keys(tutti_store *store) {
    char **keys, text[4096] = "";
    size_t count;
    tutti_status status = tutti_store_list_keys(store, &keys, &count);
    for (size_t i = 0; status == TUTTI_OK && i < count; i++) {
        strncat(text, i > 0 ? " " : "", sizeof text - strlen(text) - 1);
        strncat(text, keys[i], sizeof text - strlen(text) - 1);
    }
    if (status == TUTTI_OK)
        tutti_free(keys);
    report(status, text);
}

static void multi_get(tutti_store *store, const char *const *keys, size_t count) {
    void *values[WORDS];
    size_t bytes[WORDS];
    char text[4096] = "";
    tutti_status status = tutti_store_multi_get(store, keys, count, 0, values, bytes);
    for (size_t i = 0; status == TUTTI_OK && i < count; i++) {
        strncat(text, i > 0 ? " " : "", sizeof text - strlen(text) - 1);
        strncat(text, values[i], sizeof text - strlen(text) - 1);
        tutti_free(values[i]);
    }
    report(status, text);
}

static void multi_set(tutti_store *store, char *const *words, size_t pairs) {
    const char *keys[WORDS];
    const void *values[WORDS];
    size_t bytes[WORDS];
    for (size_t i = 0; i < pairs; i++) {
        keys[i] = words[2 * i];
        values[i] = text_of(words[2 * i + 1]);
        bytes[i] = strlen(values[i]);
    }
    report(tutti_store_multi_set(store, keys, pairs, values, bytes), "");
}

static void run(tutti_store *store, char *const *word, size_t count) {
    const char *name = word[0];
    void *value = NULL;
    int64_t number = 0;
    bool yes = false;
    tutti_status status;
    if (strcmp(name, "set") == 0) {
        report(tutti_store_set(store, word[1], text_of(word[2]), strlen(text_of(word[2]))), "");
    } else if (strcmp(name, "get") == 0) {
        status = tutti_store_get(store, word[1], NANOSECONDS(word[2]), &value, NULL);
        report_value(status, value);
    } else if (strcmp(name, "add") == 0) {
        status = tutti_store_add(store, word[1], strtoll(word[2], NULL, 10), &number);
        report_number(status, number);
    } else if (strcmp(name, "compare_set") == 0) {
        const char *expected = text_of(word[2]), *desired = text_of(word[3]);
        status =
            tutti_store_compare_set(store, word[1], expected, strlen(expected), desired, strlen(desired), &value, NULL);
        report_value(status, value);
    } else if (strcmp(name, "check") == 0) {
        status = tutti_store_check(store, (const char *const *)word + 1, count - 1, &yes);
        report_number(status, yes);
    } else if (strcmp(name, "wait") == 0) {
        report(tutti_store_wait(store, (const char *const *)word + 2, count - 2, NANOSECONDS(word[1])), "");
    } else if (strcmp(name, "delete") == 0) {
        status = tutti_store_delete(store, word[1], &yes);
        report_number(status, yes);
    } else if (strcmp(name, "num_keys") == 0) {
        status = tutti_store_num_keys(store, &number);
        report_number(status, number);
    } else if (strcmp(name, "list_keys") == 0) {
        list_keys(store);
    } else if (strcmp(name, "append") == 0) {
        report(tutti_store_append(store, word[1], word[2], strlen(word[2])), "");
    } else if (strcmp(name, "multi_get") == 0) {
        multi_get(store, (const char *const *)word + 1, count - 1);
    } else if (strcmp(name, "multi_set") == 0) {
        multi_set(store, word + 1, (count - 1) / 2);
    } else if (strcmp(name, "push") == 0) {
        report(tutti_store_queue_push(store, word[1], text_of(word[2]), strlen(text_of(word[2]))), "");
    } else if (strcmp(name, "pop") == 0) {
        bool block = strcmp(word[2], "0") != 0;
        status = tutti_store_queue_pop(store, word[1], block, NANOSECONDS(word[2]), &value, NULL);
        report_value(status, value);
    } else if (strcmp(name, "length") == 0) {
        status = tutti_store_queue_length(store, word[1], &number);
        report_number(status, number);
    } else if (strcmp(name, "barrier") == 0) {
        report(tutti_store_barrier(store, word[1], strtoll(word[2], NULL, 10), NANOSECONDS(word[3])), "");
    } else {
        printf("error unknown operation %s\n", name);
        fflush(stdout);
    }
}

int main(int argc, char **argv) {
    tutti_store *store = NULL;
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    tutti_file_store_options file = TUTTI_FILE_STORE_OPTIONS_INIT;
    options.timeout_ns = file.timeout_ns = NANOSECONDS("20000");
    tutti_status status = TUTTI_ERROR_ARGUMENT;
    if (argc == 2 && strcmp(argv[1], "server") == 0) {
        options.server = true;
        status = tutti_store_open_tcp("localhost", 0, &options, &store);
    } else if (argc == 3 && strcmp(argv[1], "client") == 0) {
        status = tutti_store_open_tcp("localhost", atoi(argv[2]), &options, &store);
    } else if (argc == 4 && strcmp(argv[1], "file") == 0) {
        file.workers = atoi(argv[3]);
        status = tutti_store_open_file(argv[2], &file, &store);
    }
    report_number(status, status == TUTTI_OK ? tutti_store_port(store) : 0);
    if (status != TUTTI_OK)
        return 1;
    char line[8192];
    while (fgets(line, sizeof line, stdin) != NULL) {
        char *word[WORDS + 4], *rest = line;
        size_t count = 0;
        for (char *next; count < WORDS && (next = strtok_r(rest, " \n", &rest)) != NULL;)
            word[count++] = next;
        for (size_t i = count; i < count + 4; i++)
            word[i] = "0";
        if (count > 0)
            run(store, word, count);
    }
    tutti_store_release(store);
    return 0;
}
