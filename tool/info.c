/* SPDX-License-Identifier: Apache-2.0
 *
 * `tutti info`: what this build is, what machine this is, how near its parts are to each other, which backends work
 * here, how this process would be launched, and every setting with its value and where it came from.
 */
#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <tutti/connectivity.h>
#include <tutti/world.h>

#include "base/clock.h"
#include "base/instructions.h"
#include "base/settings.h"
#include "info.h"
#include "job/dump.h"
#include "machine.h"
#include "memory/backend.h"
#include "tool.h"
#include "topology.h"
#include "trial.h"
#include "world/launch.h"
#include "world/world.h"

#define SHOWN_PROCESSORS 32 /* a larger matrix is shown only as JSON */

static const char help_text[] =
    "Usage: tutti info [OPTION…]\n"
    "\n"
    "Shows the build, the machine, how near its processors, NUMA nodes and ranks are to each other,\n"
    "the backends, the launch environment that a program would find here, and every setting with its\n"
    "value and where it came from. TUTTI_ variables that mean nothing are pointed out.\n"
    "\n"
    "  -n, --ranks N   for the table of ranks: as many as \"tutti run -n N\" would start;\n"
    "                  default: one per CPU, 16 at most\n"
    "      --json      as JSON, for programs\n"
    "      --hosts A,B what this says on these hosts: of the first all, of the others the lines that differ;\n"
    "                  with --rsh COMMAND as for tutti run\n"
    "\n"
    "Exit status: 0; 1 when a variable has no meaning or a value that cannot be understood, or when a\n"
    "world would not open here; 2 for wrong usage.\n";

static int info_main(int argc, char **argv);
const tool_command tool_info = { "info", "show build, machine, backends and settings", help_text, info_main };

/* Text and JSON go through the same few functions. */
static bool as_json;
static int problems;

static void heading(const char *name) {
    if (as_json)
        printf(",\n");
    else
        printf("\n%s\n", name);
}

/* "  name    value", or "name": "value" with a comma unless it is the first. */
static void row(const char *name, const char *value, bool first) {
    if (!as_json) {
        printf("  %-24s %s\n", name, value);
        return;
    }
    printf("%s", first ? "" : ", ");
    tu_json_string(stdout, name);
    printf(": ");
    tu_json_string(stdout, value);
}

/* ---- build ---- */

static void show_build(void) {
    static const struct {
        const char *name;
        int here;
    } options[] = { { "hwloc", TUTTI_HAVE_HWLOC },
                    { "libsodium", TUTTI_HAVE_SODIUM },
                    { "CBLAS", TUTTI_HAVE_CBLAS },
                    { "oneDNN", TUTTI_HAVE_DNNL } };
    char with[128] = "", without[128] = "";
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
        char *list = options[i].here ? with : without;
        size_t used = strlen(list);
        snprintf(list + used, sizeof with - used, "%s%s", used > 0 ? ", " : "", options[i].name);
    }
    if (as_json)
        printf("{\"build\": {");
    else
        printf("Build\n");
    row("version", tutti_version(), true);
#if defined(__clang__)
    row("compiler", "clang " __clang_version__, false);
#else
    row("compiler", "gcc " __VERSION__, false);
#endif
    row("with", with, false);
    if (without[0] != '\0')
        row("without", without, false);
#ifdef TUTTI_SANITIZED
    row("sanitizers", "on: slow, for tests", false);
#endif
    if (as_json)
        printf("}");
}

/* ---- machine ---- */

static int places(tutti_place place) {
    tutti_connectivity *connectivity;
    if (tutti_connectivity_machine(place, &connectivity) != TUTTI_OK)
        return -1;
    int size = tutti_connectivity_size(connectivity);
    tutti_connectivity_release(connectivity);
    return size;
}

/* "24684100 kB" of /proc/meminfo, for people. */
static void show_memory(const char *name, const char *key) {
    char text[64] = "unknown";
    if (machine_line_of("/proc/meminfo", key, text, sizeof text) && !as_json)
        snprintf(text, sizeof text, "%.1f GiB", strtod(text, NULL) / (1 << 20));
    row(name, text, false);
}

static void show_machine(void) {
    struct utsname system;
    char text[256];
    uname(&system);
    heading("Machine");
    if (as_json)
        printf("\"machine\": {");
    row("host", system.nodename, true);
    snprintf(text, sizeof text, "%s %s %s", system.sysname, system.release, system.machine);
    row("system", text, false);
    machine_processor(text, sizeof text);
    row("processor", text, false);
    snprintf(text, sizeof text, "%d of %ld", topology_cpus(), sysconf(_SC_NPROCESSORS_ONLN));
    row("CPUs for this process", text, false);
    int nodes = places(TUTTI_PLACE_NODE);
    if (nodes > 0)
        snprintf(text, sizeof text, "%d", nodes);
    else
        snprintf(text, sizeof text, "unknown: %s", tutti_error_message());
    row("NUMA nodes", text, false);
    text[0] = '\0';
    for (tu_instructions level = TU_REFERENCE; level < TU_INSTRUCTIONS_END; level++) {
        size_t used = strlen(text);
        if (tu_instructions_present(level))
            snprintf(text + used, sizeof text - used, "%s%s", used > 0 ? " " : "", tu_instructions_name(level));
    }
    row("instruction sets", text, false);
    show_memory("memory", "MemTotal");
    show_memory("memory available", "MemAvailable");
    if (as_json)
        printf("}");
}

/* ---- connectivity ---- */

typedef struct matrix {
    int size;
    const tutti_connectivity *machine; /* between processors or nodes */
    const binding *bindings;           /* of ranks; NULL: the machine's own */
    const int *cpus;                   /* OS number of each processor of the machine */
} matrix;

static bool bound_to(const binding *bound, int cpu) {
    size_t bits = 8 * sizeof(unsigned long);
    return (bound->cpus[(size_t)cpu / bits] >> (size_t)cpu % bits & 1) != 0;
}

/* Two ranks are as far apart as the farthest of their processors. */
static tutti_link link_of(const matrix *links, int from, int to) {
    if (links->bindings == NULL || from == to)
        return tutti_connectivity_link(links->machine, from, to);
    tutti_link farthest = TUTTI_LINK_SELF;
    int processors = tutti_connectivity_size(links->machine);
    for (int i = 0; i < processors; i++)
        for (int j = 0; j < processors; j++)
            if (bound_to(&links->bindings[from], links->cpus[i]) && bound_to(&links->bindings[to], links->cpus[j]) &&
                tutti_connectivity_link(links->machine, i, j) > farthest)
                farthest = tutti_connectivity_link(links->machine, i, j);
    return farthest;
}

static void matrix_text(const matrix *links, const char *what) {
    printf("  %-8s", what);
    for (int to = 0; to < links->size; to++)
        printf(" %7d", to);
    putchar('\n');
    for (int from = 0; from < links->size; from++) {
        printf("  %-8d", from);
        for (int to = 0; to < links->size; to++)
            printf(" %7s", tutti_link_name(link_of(links, from, to)));
        printf("   %s\n",
               links->bindings != NULL ? links->bindings[from].text : tutti_connectivity_place(links->machine, from));
    }
}

static void matrix_json(const matrix *links, const char *name, bool distances) {
    printf("\"%s\": {\"places\": [", name);
    for (int from = 0; from < links->size; from++) {
        printf("%s", from > 0 ? ", " : "");
        tu_json_string(stdout, links->bindings != NULL ? links->bindings[from].text
                                                       : tutti_connectivity_place(links->machine, from));
    }
    printf("], \"links\": [");
    for (int from = 0; from < links->size; from++) {
        printf("%s[", from > 0 ? ", " : "");
        for (int to = 0; to < links->size; to++)
            printf("%s\"%s\"", to > 0 ? ", " : "", tutti_link_name(link_of(links, from, to)));
        printf("]");
    }
    printf("]");
    if (distances) {
        printf(", \"distances\": [");
        for (int from = 0; from < links->size; from++) {
            printf("%s[", from > 0 ? ", " : "");
            for (int to = 0; to < links->size; to++)
                printf("%s%d", to > 0 ? ", " : "", tutti_connectivity_distance(links->machine, from, to));
            printf("]");
        }
        printf("]");
    }
    printf("}");
}

static void show_matrix(const matrix *links, const char *title, const char *what, const char *name, bool distances) {
    if (as_json) {
        printf(", ");
        matrix_json(links, name, distances);
        return;
    }
    printf("\n%s\n", title);
    if (links->size > SHOWN_PROCESSORS) {
        printf("  %d places: --json has the table\n", links->size);
        return;
    }
    matrix_text(links, what);
    if (!distances || tutti_connectivity_distance(links->machine, 0, 0) == 0)
        return;
    printf("  distances as the firmware gives them (10 is local):\n");
    for (int from = 0; from < links->size; from++) {
        printf("  %-8d", from);
        for (int to = 0; to < links->size; to++)
            printf(" %7d", tutti_connectivity_distance(links->machine, from, to));
        putchar('\n');
    }
}

static void show_ranks(const tutti_connectivity *machine, int ranks) {
    int processors = tutti_connectivity_size(machine);
    int *cpus = calloc((size_t)processors, sizeof *cpus);
    binding *bindings = calloc((size_t)ranks, sizeof *bindings);
    char why[160];
    if (cpus == NULL || bindings == NULL)
        goto free_both;
    for (int i = 0; i < processors; i++)
        sscanf(tutti_connectivity_place(machine, i), "processor %d", &cpus[i]);
    if (topology_bind(BIND_AUTO, ranks, bindings, why, sizeof why) == 1) {
        matrix links = { ranks, machine, bindings, cpus };
        char title[80];
        snprintf(title, sizeof title, "What ranks of \"tutti run -n %d\" share", ranks);
        show_matrix(&links, title, "rank", "ranks", false);
    } else if (!as_json) {
        printf("\nWhat ranks of \"tutti run -n %d\" share\n  %s\n", ranks, why);
    }
free_both:
    free(bindings);
    free(cpus);
}

static void show_connectivity(int ranks) {
    tutti_connectivity *machine;
    if (tutti_connectivity_machine(TUTTI_PLACE_PROCESSOR, &machine) != TUTTI_OK) {
        if (!as_json)
            printf("\nWhat processors share\n  %s\n", tutti_error_message());
        return;
    }
    matrix processors = { tutti_connectivity_size(machine), machine, NULL, NULL };
    show_matrix(&processors, "What processors share", "index", "processors", false);
    show_ranks(machine, ranks);
    tutti_connectivity_release(machine);
    if (tutti_connectivity_machine(TUTTI_PLACE_NODE, &machine) != TUTTI_OK)
        return;
    matrix nodes = { tutti_connectivity_size(machine), machine, NULL, NULL };
    show_matrix(&nodes, "What NUMA nodes share", "node", "nodes", true);
    tutti_connectivity_release(machine);
}

/* ---- backends and launch ---- */

/* Links between devices, a row of the matrix each: "0 18 18". */
static void show_links(const tu_backend *backend, const char *name, int devices) {
    int matrix[16 * 16];
    char label[64], text[512];
    if (devices > 16)
        devices = 16;
    if (backend->memory->links(&tu_backend_host_table, matrix, devices) != TUTTI_OK) {
        snprintf(label, sizeof label, "%s links", name);
        row(label, tutti_error_message(), false);
        return;
    }
    for (int from = 0; from < devices; from++) {
        int used = 0;
        for (int to = 0; to < devices; to++)
            used += snprintf(text + used, sizeof text - (size_t)used, "%s%d", to > 0 ? " " : "",
                             matrix[from * devices + to]);
        snprintf(label, sizeof label, "%s links of device %d", name, from);
        row(label, text, false);
    }
}

/* The library behind a backend: "NCCL 2.28.9 (/usr/lib/libnccl.so.2): …". */
static void show_library(const char *name, const tu_backend *backend) {
    char label[64], text[1024] = "";
    if (backend == NULL || backend->describe == NULL)
        return;
    backend->describe(&tu_backend_host_table, text, sizeof text);
    snprintf(label, sizeof label, "%s library", name);
    if (text[0] != 0)
        row(label, text, false);
}

typedef struct shown_backends {
    tutti_world *world;
    int count;
} shown_backends;

static void show_backend(const char *name, void *argument) {
    shown_backends *shown = argument;
    const tu_backend *backend = NULL;
    int devices = 0;
    char text[2600];
    if (tu_backend_find(shown->world, name, &backend) != TUTTI_OK)
        snprintf(text, sizeof text, "cannot be used: %s", tutti_error_message());
    else if (backend->probe(&tu_backend_host_table, &devices) != TUTTI_OK)
        snprintf(text, sizeof text, "has nothing to do here: %s", tutti_error_message());
    else
        snprintf(text, sizeof text, "works, %d device%s", devices, devices == 1 ? "" : "s");
    row(name, text, false);
    shown->count++;
    show_library(name, backend);
    if (devices > 0 && backend->memory != NULL && backend->memory->links != NULL)
        show_links(backend, name, devices);
}

/* A world of one rank is what a backend is asked through; that it opens is worth knowing, too. */
static void show_backends(void) {
    tutti_world_options options = TUTTI_WORLD_OPTIONS_INIT;
    tutti_world *world = NULL;
    options.name = "tutti info";
    options.rank_count = 1;
    int64_t begin = tu_clock_now();
    tutti_status opened = tutti_world_open(&options, &world);
    char text[2600];
    heading("Backends");
    if (as_json)
        printf("\"backends\": {");
    if (opened == TUTTI_OK)
        snprintf(text, sizeof text, "opens in %.2f ms", (double)(tu_clock_now() - begin) / 1e6);
    else
        snprintf(text, sizeof text, "does not open: %s", tutti_error_message());
    row("a world of one rank", text, true);
    problems += opened != TUTTI_OK;
    if (opened == TUTTI_OK) {
        shown_backends shown = { .world = world };
        show_backend("shm", &shown);
        tu_backend_list(world, show_backend, &shown);
        if (shown.count == 1)
            row("plug-ins", "none found; TUTTI_PLUGIN_PATH names folders that have some", false);
    }
    if (opened == TUTTI_OK && tutti_world_close(world) != TUTTI_OK)
        row("closing it", tutti_error_message(), false);
    if (as_json)
        printf("}");
}

static void show_launch(void) {
    tu_settings settings;
    tu_launch launch;
    char text[2200];
    tutti_world_options options = TUTTI_WORLD_OPTIONS_INIT;
    heading("Launch environment");
    if (as_json)
        printf("\"launch\": {");
    tutti_status status = tu_settings_load(&settings);
    if (status == TUTTI_OK) {
        status = tu_launch_find(&options, &settings, NULL, &launch);
        tu_settings_free(&settings);
    }
    if (status != TUTTI_OK) {
        snprintf(text, sizeof text, "a program could not open its world here: %s", tutti_error_message());
        row("found", text, true);
        problems++;
    } else {
        snprintf(text, sizeof text, "%s", launch.launcher);
        row("found", text, true);
        snprintf(text, sizeof text, "%d of %d", launch.rank, launch.size);
        row("rank", text, false);
        row("meeting place", launch.url[0] != '\0' ? launch.url : "none needed", false);
    }
    if (as_json)
        printf("}");
}

/* ---- settings ---- */

/* What the environment says, and what is wrong with it. */
typedef struct given {
    char *value; /* NULL: nothing, or nothing in it */
    char problem[1600];
} given;

/* Each variable is tried on its own, so that one bad value does not hide the others: first whether it can be
 * understood, then whether a world opens with it. Those of the launch environment are shown by show_launch. */
static void try_settings(given *all) {
    tu_settings settings;
    for (int i = 0; i < TU_SETTING_COUNT; i++) {
        const char *text = getenv(tu_setting_rows[i].environment);
        all[i].value = text != NULL && *text != '\0' ? strdup(text) : NULL;
        unsetenv(tu_setting_rows[i].environment);
    }
    bool loaded = tu_settings_load(&settings) == TUTTI_OK;
    for (int i = 0; i < TU_SETTING_COUNT && loaded; i++) {
        if (all[i].value == NULL)
            continue;
        setenv(tu_setting_rows[i].environment, all[i].value, 1);
        if (tu_settings_set(&settings, (tu_setting)i, all[i].value) != TUTTI_OK)
            snprintf(all[i].problem, sizeof all[i].problem, "%s", tutti_error_message());
        else if (!trial(i != TU_SETTING_FAULT, all[i].problem, sizeof all[i].problem) && all[i].problem[0] == '\0')
            snprintf(all[i].problem, sizeof all[i].problem, "a world does not open with it");
        unsetenv(tu_setting_rows[i].environment);
    }
    if (loaded)
        tu_settings_free(&settings);
    for (int i = 0; i < TU_SETTING_COUNT; i++) {
        if (all[i].value != NULL)
            setenv(tu_setting_rows[i].environment, all[i].value, 1);
        problems += all[i].problem[0] != '\0';
    }
}

static void show_setting(int setting, const given *given, bool first) {
    const tu_setting_row *about = &tu_setting_rows[setting];
    const char *value = given->value != NULL ? given->value : about->default_text;
    const char *origin = given->value != NULL ? "environment" : "default";
    if (as_json) {
        printf("%s\n  {\"name\": \"%s\", \"value\": ", first ? "" : ",", about->environment);
        tu_json_string(stdout, value);
        printf(", \"origin\": \"%s\", \"meaning\": ", origin);
        tu_json_string(stdout, about->meaning);
        if (given->problem[0] != '\0') {
            printf(", \"problem\": ");
            tu_json_string(stdout, given->problem);
        }
        printf("}");
        return;
    }
    printf("  %-22s %-16s %-12s %s\n", about->environment, *value != '\0' ? value : "-", origin, about->meaning);
    if (given->problem[0] != '\0')
        printf("      ^ %s\n", given->problem);
}

static void show_unknown(const char *name, const char *nearest, void *argument) {
    int *count = argument;
    problems++;
    if (as_json)
        printf("%s{\"name\": \"%s\", \"nearest\": \"%s\"}", *count > 0 ? ", " : "", name, nearest);
    else
        printf("  %-22s means nothing to Tutti; did you mean %s?\n", name, nearest);
    (*count)++;
}

static void show_settings(const given *all) {
    heading("Settings");
    if (as_json)
        printf("\"settings\": [");
    else
        printf("  %-22s %-16s %-12s %s\n", "VARIABLE", "VALUE", "FROM", "MEANING");
    for (int i = 0; i < TU_SETTING_COUNT; i++)
        show_setting(i, &all[i], i == 0);
    int unknown = 0;
    if (as_json)
        printf("],\n\"unknown\": [");
    tu_settings_unknown(show_unknown, &unknown);
    if (as_json)
        printf("]}\n");
}

static int info_main(int argc, char **argv) {
    static const struct option longs[] = {
        { "ranks", required_argument, NULL, 'n' }, { "json", no_argument, NULL, 'j' },
        { "hosts", required_argument, NULL, 'H' }, { "rsh", required_argument, NULL, 'R' },
        { "help", no_argument, NULL, 'h' },        { 0 }
    };
    const char *hosts = NULL, *rsh = NULL;
    int64_t ranks = 0;
    int option;
    opterr = 0;
    while ((option = getopt_long(argc, argv, ":n:h", longs, NULL)) != -1) {
        switch (option) {
        case 'n':
            if (tu_parse_integer(optarg, &ranks) || ranks < 1 || ranks > 1024)
                return tool_usage(&tool_info, "-n %s: the number of ranks must be from 1 to 1024", optarg);
            break;
        case 'j':
            as_json = true;
            break;
        case 'H':
            hosts = optarg;
            break;
        case 'R':
            rsh = optarg;
            break;
        default:
            return tool_other_option(&tool_info, option, argv, longs);
        }
    }
    if (optind < argc)
        return tool_usage(&tool_info, "\"%s\": it takes options alone", argv[optind]);
    if ((rsh != NULL && hosts == NULL) || (hosts != NULL && as_json))
        return tool_usage(&tool_info, rsh != NULL && hosts == NULL ? "--rsh goes with --hosts"
                                                                   : "--json is of one host: run it on each");
    if (hosts != NULL)
        return info_hosts(hosts, rsh, ranks);
    if (ranks == 0)
        ranks = topology_cpus() < 16 ? topology_cpus() : 16;
    static given settings[TU_SETTING_COUNT];
    try_settings(settings); /* first, while this process has one thread */
    show_build();
    show_machine();
    show_connectivity((int)ranks);
    show_backends();
    show_launch();
    show_settings(settings);
    for (int i = 0; i < TU_SETTING_COUNT; i++)
        free(settings[i].value);
    return problems > 0;
}
