/* SPDX-License-Identifier: Apache-2.0
 *
 * The headers of compiled loops, taken into the library by the assembler.
 */
#include "loops/text.h"

#include <stdbool.h>
#include <string.h>

#define TEXT(name, path)                                                                 \
    __asm__(".pushsection .rodata\n"                                                     \
            ".hidden tu_text_" #name "\n.global tu_text_" #name "\ntu_text_" #name ":\n" \
            ".incbin \"" TUTTI_SOURCES "/" path "\"\n.byte 0\n"                          \
            ".popsection\n");                                                            \
    extern const char tu_text_##name[] __attribute__((visibility("hidden")));

TEXT(scalar, "tensor/kernel/scalar.h")
TEXT(vector, "tensor/kernel/vector.h")
TEXT(avx2, "tensor/kernel/avx2.h")
TEXT(avx512, "tensor/kernel/avx512.h")
TEXT(neon, "tensor/kernel/neon.h")
TEXT(elementary, "tensor/kernel/elementary.h")
TEXT(dialect, "tensor/dialect.h")
TEXT(lanes, "loops/lanes.h")

typedef struct header {
    const char *path, *text;
} header;

enum {
    HEADERS = 8
};

static const header headers[HEADERS] = {
    { "tensor/kernel/scalar.h", tu_text_scalar }, { "tensor/kernel/vector.h", tu_text_vector },
    { "tensor/kernel/avx2.h", tu_text_avx2 },     { "tensor/kernel/avx512.h", tu_text_avx512 },
    { "tensor/kernel/neon.h", tu_text_neon },     { "tensor/kernel/elementary.h", tu_text_elementary },
    { "tensor/dialect.h", tu_text_dialect },      { "loops/lanes.h", tu_text_lanes },
};

static void write(FILE *to, const char *path, size_t length, bool *written) {
    int which = 0;
    while (which < HEADERS &&
           (strlen(headers[which].path) != length || strncmp(headers[which].path, path, length) != 0))
        which++;
    if (which == HEADERS || written[which])
        return;
    written[which] = true;
    for (const char *line = headers[which].text; *line != 0;) {
        size_t rest = strcspn(line, "\n");
        static const char include[] = "#include \"";
        if (strncmp(line, include, sizeof include - 1) == 0)
            write(to, line + sizeof include - 1, strcspn(line + sizeof include - 1, "\""), written);
        else
            fprintf(to, "%.*s\n", (int)rest, line);
        line += rest + (line[rest] == '\n');
    }
}

void tu_lanes_write(FILE *to, tu_instructions level) {
    bool written[HEADERS] = { false };
    const char *first = level == TU_AVX512 ? "tensor/kernel/avx512.h"
                        : level == TU_AVX2 ? "tensor/kernel/avx2.h"
                        : level == TU_NEON ? "tensor/kernel/neon.h"
                                           : "tensor/kernel/scalar.h";
    static const char last[] = "loops/lanes.h";
    write(to, first, strlen(first), written);
    write(to, last, sizeof last - 1, written);
}
