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
    printf("An entry with an in-place form has a second function, with `_` behind its name, which writes the first "
           "tensor and returns it.\n");
    printf("Entries without a function are what gradients are made of. Narrow floats compute in f32 and round once. "
           "Where an operator works\n");
    printf("element by element, its expression follows; compiled code computes the same one.\n");
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
        printf(" | %s | %s | %s | %s | %s |\n", row->dtypes != NULL ? row->dtypes : "any",
               row->differentiable ? "yes" : "", row->in_place ? "yes" : "", row->view ? "yes" : "",
               row->pure ? "yes" : "");
    }
    free(table);
    return 0;
}
