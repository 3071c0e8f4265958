/* SPDX-License-Identifier: Apache-2.0
 *
 * Prints the operator table as Markdown: this is how docs/operators.md is made (scripts/operators).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tutti/ops.h>

static int by_family_and_name(const void *a, const void *b) {
    const tt_operator_info *x = a, *y = b;
    int families = strcmp(x->family, y->family);
    return families != 0 ? families : strcmp(x->name, y->name);
}

static void print_cell(const char *text) {
    for (; *text != 0; text++)
        printf(*text == '|' ? "\\|" : "%c", *text);
    printf(" | ");
}

int main(void) {
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
    printf("# Operators\n\nMade from the operator table by `scripts/operators`; do not edit. %d entries.\n\n", count);
    printf("The C function of an entry is its name behind `tt_`; one with an in-place form has that behind its name "
           "with `_`, too.\n");
    printf("`copy`, `fill`, `normal` and `uniform` have the in-place form only. Entries that end in `_backward` are "
           "what gradients are made of; they have no\n");
    printf("public function. Schemas name the tensors first; `tutti/ops.h` and `tutti/functional.h` have the order of "
           "the arguments.\n");
    for (int i = 0; i < count; i++) {
        const tt_operator_info *o = &table[i];
        if (i == 0 || strcmp(o->family, table[i - 1].family) != 0)
            printf("\n## %c%s\n\n| operator | what it does | gradient | in place | view | pure "
                   "|\n|---|---|---|---|---|---|\n",
                   o->family[0] - 'a' + 'A', o->family + 1);
        printf("| ");
        printf("`%s` | ", o->schema);
        print_cell(o->summary);
        printf("%s | %s | %s | %s |\n", o->differentiable ? "yes" : "", o->in_place ? "yes" : "", o->view ? "yes" : "",
               o->pure ? "yes" : "");
    }
    free(table);
    return 0;
}
