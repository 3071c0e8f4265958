/* SPDX-License-Identifier: Apache-2.0
 *
 * Prints the operator table as Markdown, or with `header` as declarations: this is how docs/operators.md and most of
 * tutti/ops.h are made (scripts/operators).
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tutti/ops.h>

/* The families in reading order; the first of them are declared in tutti/ops.h. */
static const char *const families[] = {
    "arithmetic",      "functions", "activations", "comparison",           "reductions",
    "matrix products", "views",     "copies",      "joining and indexing", "networks",
    "creation",        "random",    "optimizers",  "lists and sharding",   "collectives",
    "autograd",        "effects"
};
enum {
    FAMILIES = sizeof families / sizeof families[0],
    DECLARED = 10
};

static int family_of(const tt_operator_info *row) {
    int at = 0;
    while (at < FAMILIES && strcmp(families[at], row->family) != 0)
        at++;
    return at;
}

static int by_family_and_name(const void *left, const void *right) {
    int of_a = family_of(left), of_b = family_of(right);
    return of_a != of_b ? of_a - of_b
                        : strcmp(((const tt_operator_info *)left)->name, ((const tt_operator_info *)right)->name);
}

static void print_cell(const char *text) {
    for (; *text != 0; text++)
        printf(*text == '|' ? "\\|" : "%c", *text);
}

/* ---- declarations for include/tutti/ops.h ---- */

/* A row may describe a function of another name, which has its own. */
static bool is_declared_here(const tt_operator_info *row) {
    if (family_of(row) >= DECLARED || row->prototype == NULL)
        return false;
    size_t end = strcspn(row->prototype, "("), length = strlen(row->name);
    if (row->prototype[end - 1] == '_')
        end--;
    return end > length + 3 && strncmp(row->prototype + end - length - 3, "tt_", 3) == 0 &&
           strncmp(row->prototype + end - length, row->name, length) == 0;
}

static void print_declaration(const tt_operator_info *row) {
    const char *bracket = strchr(row->prototype, '(');
    printf("/* %s. For %s%s. */\n", row->summary, row->dtypes != NULL ? row->dtypes : "any dtype",
           row->differentiable ? "; has a gradient" : "");
    printf("TUTTI_API %s;\n", row->prototype);
    if (row->in_place && bracket[-1] != '_')
        printf("TUTTI_API %.*s_%s; /* in place */\n", (int)(bracket - row->prototype), row->prototype, bracket);
}

static void print_header(const tt_operator_info *table, int count) {
    const char *family = "";
    for (int i = 0; i < count; i++) {
        if (!is_declared_here(&table[i]))
            continue;
        if (strcmp(family, table[i].family) != 0)
            printf("\n/* ---- %s ---- */\n", table[i].family);
        family = table[i].family;
        print_declaration(&table[i]);
    }
}

/* ---- the page ---- */

static void print_page(const tt_operator_info *table, int count) {
    printf("# Operators\n\nMade from the operator table by `scripts/operators`; do not edit. %d entries.\n\n", count);
    printf("An entry with an in-place form has a second function, with `_` behind its name, which writes the first "
           "tensor and returns it.\n");
    printf("Entries without a function are what gradients are made of. Narrow floats compute in f32 and round once. "
           "Where an operator works\n");
    printf("element by element, its expression follows; compiled code computes the same one. \"The entry\" tells what "
           "a recorder sees\nwhere a function has other arguments than its entry.\n");
    for (int i = 0; i < count; i++) {
        const tt_operator_info *row = &table[i];
        if (i == 0 || strcmp(row->family, table[i - 1].family) != 0)
            printf("\n## %c%s\n\n| operator | what it does | dtypes | gradient | in place | view | pure "
                   "|\n|---|---|---|---|---|---|---|\n",
                   row->family[0] - 'a' + 'A', row->family + 1);
        printf("| `%s` | ", row->prototype != NULL ? row->prototype : row->name);
        print_cell(row->summary);
        if (row->expression != NULL) {
            printf("<br>`");
            print_cell(row->expression);
            printf("`");
        }
        if (row->differs != NULL) {
            printf("<br>The entry: ");
            print_cell(row->differs);
        }
        printf(" | %s | %s | %s | %s | %s |\n", row->dtypes != NULL ? row->dtypes : "any",
               row->differentiable ? "yes" : "", row->in_place ? "yes" : "", row->view ? "yes" : "",
               row->pure ? "yes" : "");
    }
}

int main(int argc, char **argv) {
    int count = tt_operator_count();
    tt_operator_info *table = calloc((size_t)count, sizeof *table);
    if (table == NULL)
        return 1;
    for (int i = 0; i < count; i++) {
        table[i].size = sizeof table[i];
        if (tt_operator_at(i, &table[i]) != TUTTI_OK) {
            fprintf(stderr, "%s\n", tutti_error_message());
            free(table);
            return 1;
        }
    }
    qsort(table, (size_t)count, sizeof *table, by_family_and_name);
    if (argc > 1 && strcmp(argv[1], "header") == 0)
        print_header(table, count);
    else
        print_page(table, count);
    free(table);
    return 0;
}
