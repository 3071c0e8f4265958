/* SPDX-License-Identifier: Apache-2.0 */
#include "base/nearest.h"

#include <string.h>

#define LONGEST 63

static int smaller(int one, int other) {
    return one < other ? one : other;
}

/* Three rows of the table of distances between the beginnings of both names: this letter, the one before it, and the
 * one before that, which a swap needs. */
int tu_letters_apart(const char *one, const char *other) {
    int rows[3][LONGEST + 1];
    int columns = (int)strlen(other);
    if (columns > LONGEST || strlen(one) > LONGEST)
        return 1000;
    for (int j = 0; j <= columns; j++)
        rows[0][j] = j;
    int i = 0;
    for (; one[i] != '\0'; i++) {
        const int *above = rows[i % 3], *two_above = rows[(i + 2) % 3];
        int *row = rows[(i + 1) % 3];
        row[0] = i + 1;
        for (int j = 1; j <= columns; j++) {
            row[j] = smaller(above[j - 1] + (one[i] != other[j - 1]), 1 + smaller(above[j], row[j - 1]));
            if (i > 0 && j > 1 && one[i] == other[j - 2] && one[i - 1] == other[j - 1])
                row[j] = smaller(row[j], two_above[j - 2] + 1);
        }
    }
    return rows[i % 3][columns];
}
