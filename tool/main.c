/* SPDX-License-Identifier: Apache-2.0
 *
 * The tutti command: finds the sub-command and hands over. Also `tutti help` and the little things that sub-commands
 * share.
 */
#include <getopt.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/nearest.h"
#include "tool.h"

static const tool_command *const commands[] = {
    &tool_run, &tool_bench, &tool_info, &tool_doctor, &tool_ps, &tool_trace
};
#define COMMANDS (sizeof commands / sizeof commands[0])

static const tool_command *find(const char *name) {
    for (size_t i = 0; i < COMMANDS; i++)
        if (strcmp(commands[i]->name, name) == 0)
            return commands[i];
    return NULL;
}

static int unknown(const char *name) {
    const char *names[COMMANDS + 1] = { "help" };
    for (size_t i = 0; i < COMMANDS; i++)
        names[i + 1] = commands[i]->name;
    const char *nearest = tool_nearest(name, names, COMMANDS + 1);
    if (nearest != NULL)
        return tool_usage(NULL, "there is no sub-command \"%s\". Did you mean \"%s\"?", name, nearest);
    return tool_usage(NULL, "there is no sub-command \"%s\"", name);
}

static int help(const char *name) {
    if (name != NULL) {
        const tool_command *command = find(name);
        if (command == NULL)
            return unknown(name);
        fputs(command->help, stdout);
        return 0;
    }
    puts("Usage: tutti COMMAND [OPTION…]\n\n"
         "Starts, measures and looks into jobs that use Tutti: symmetric memory and collectives for C.\n");
    for (size_t i = 0; i < COMMANDS; i++)
        printf("  %-8s %s\n", commands[i]->name, commands[i]->summary);
    puts("  help     explain a command: tutti help run\n\n"
         "  --version    print the version\n"
         "  -h, --help   print this");
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        help(NULL);
        return TOOL_USAGE;
    }
    const char *name = argv[1];
    if (strcmp(name, "--version") == 0 || strcmp(name, "-V") == 0) {
        printf("tutti %s\n", tutti_version());
        return 0;
    }
    if (strcmp(name, "help") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0)
        return help(argc > 2 ? argv[2] : NULL);
    const tool_command *command = find(name);
    if (command == NULL)
        return unknown(name);
    return command->main(argc - 1, argv + 1);
}

/* The one that `name` is the beginning of, else the one that a typing mistake made it of. */
const char *tool_nearest(const char *name, const char *const *names, size_t count) {
    const char *nearest = NULL;
    int best = TU_TYPING_MISTAKE + 1;
    for (size_t i = 0; i < count; i++) {
        if (name[0] != 0 && strncmp(name, names[i], strlen(name)) == 0)
            return names[i];
        int apart = tu_letters_apart(name, names[i]);
        if (apart < best && apart < (int)strlen(name)) { /* of one or two letters nothing may be left */
            best = apart;
            nearest = names[i];
        }
    }
    return nearest;
}

int tool_usage(const tool_command *command, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "tutti%s%s: ", command != NULL ? " " : "", command != NULL ? command->name : "");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n\"tutti help%s%s\" explains it.\n", command != NULL ? " " : "",
            command != NULL ? command->name : "");
    va_end(arguments);
    return TOOL_USAGE;
}

/* "--json=5": the option that was given a value it does not take; NULL when that is not what is wrong. */
static const char *valueless(const char *typed, const struct option *longs) {
    size_t length = strcspn(typed, "=");
    if (length < 3 || typed[length] == 0 || strncmp(typed, "--", 2) != 0)
        return NULL;
    const char *found = NULL;
    for (; longs->name != NULL; longs++) {
        bool begins = longs->has_arg == no_argument && strncmp(longs->name, typed + 2, length - 2) == 0;
        if (begins && (found == NULL || longs->name[length - 2] == 0)) /* getopt takes beginnings of names too */
            found = longs->name;
    }
    return found;
}

/* "--rank=4" was typed, and "--ranks" may have been meant. */
static int unknown_option(const tool_command *command, const char *typed, const struct option *longs) {
    const char *names[64];
    char name[64];
    size_t count = 0, length = strcspn(typed + 2, "=");
    snprintf(name, sizeof name, "%.*s", (int)length, typed + 2);
    for (; longs[count].name != NULL && count < sizeof names / sizeof names[0]; count++)
        names[count] = longs[count].name;
    const char *nearest = tool_nearest(name, names, count);
    if (nearest != NULL)
        return tool_usage(command, "there is no option --%s. Did you mean --%s?", name, nearest);
    return tool_usage(command, "there is no option --%s", name);
}

int tool_other_option(const tool_command *command, int option, char *const *argv, const struct option *longs) {
    const char *typed = argv[optind - 1];
    if (option == 'h') {
        fputs(command->help, stdout);
        return 0;
    }
    if (option == ':')
        return tool_usage(command, "%s needs a value", typed);
    /* Of "-xy" getopt has not gone past the argument when it comes upon x: `typed` is the one before it then. */
    if (optopt == 0)
        return unknown_option(command, typed, longs);
    if (valueless(typed, longs) != NULL)
        return tool_usage(command, "--%s takes no value", valueless(typed, longs));
    return tool_usage(command, "there is no option -%c", optopt);
}

int tool_fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("tutti: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    return 1;
}

bool tool_colour(int descriptor) {
    const char *no_colour = getenv("NO_COLOR"), *terminal = getenv("TERM");
    return isatty(descriptor) && (no_colour == NULL || *no_colour == '\0') &&
           (terminal == NULL || strcmp(terminal, "dumb") != 0);
}

void tool_wait_text(int wait_status, char *text, size_t bytes) {
    if (WIFSIGNALED(wait_status))
        snprintf(text, bytes, "was killed by signal %d (%s)%s", WTERMSIG(wait_status), strsignal(WTERMSIG(wait_status)),
                 WCOREDUMP(wait_status) ? ", core dumped" : "");
    else
        snprintf(text, bytes, "exited with status %d", WEXITSTATUS(wait_status));
}

void tool_rank_list(const bool *chosen, int count, char *text, size_t bytes) {
    int starts[64], ends[64], runs = 0;
    bool more = false;
    for (int i = 0; i < count; i++) {
        if (!chosen[i])
            continue;
        int end = i;
        while (end + 1 < count && chosen[end + 1])
            end++;
        if (end < i + 2) /* two neighbours are two ranks, three are a run */
            end = i;
        if (runs == 64) {
            more = true;
            break;
        }
        starts[runs] = i;
        ends[runs++] = end;
        i = end;
    }
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < runs && used < bytes; i++) {
        const char *between = i == 0 ? "" : i == runs - 1 && !more ? " and " : ", ";
        int wrote = starts[i] == ends[i] ? snprintf(text + used, bytes - used, "%s%d", between, starts[i])
                                         : snprintf(text + used, bytes - used, "%s%d-%d", between, starts[i], ends[i]);
        used += (size_t)wrote;
    }
    if (more && used < bytes)
        snprintf(text + used, bytes - used, " and others");
}
