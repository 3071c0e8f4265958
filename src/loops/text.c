/* SPDX-License-Identifier: Apache-2.0
 *
 * The headers of compiled loops, taken into the library by the assembler.
 */
#include "loops/text.h"

#include <ctype.h>
#include <stdbool.h>
#include <string.h>

#include <tutti/dtype.h>

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
TEXT(float16, "base/float16.h")
TEXT(element, "base/element.h")
TEXT(near, "loops/near.cuh")
TEXT(device, "loops/device.cuh")

typedef struct header {
    const char *path, *text;
} header;

enum {
    HEADERS = 12
};

static const header headers[HEADERS] = {
    { "tensor/kernel/scalar.h", tu_text_scalar }, { "tensor/kernel/vector.h", tu_text_vector },
    { "tensor/kernel/avx2.h", tu_text_avx2 },     { "tensor/kernel/avx512.h", tu_text_avx512 },
    { "tensor/kernel/neon.h", tu_text_neon },     { "tensor/kernel/elementary.h", tu_text_elementary },
    { "tensor/dialect.h", tu_text_dialect },      { "loops/lanes.h", tu_text_lanes },
    { "base/float16.h", tu_text_float16 },        { "base/element.h", tu_text_element },
    { "loops/near.cuh", tu_text_near },           { "loops/device.cuh", tu_text_device },
};

/* Headers of the system are left out where there are none. */
static void write(FILE *to, const char *path, size_t length, bool system, bool *written) {
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
            write(to, line + sizeof include - 1, strcspn(line + sizeof include - 1, "\""), system, written);
        else if (system || strncmp(line, "#include <", 10) != 0)
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
    write(to, first, strlen(first), true, written);
    write(to, last, sizeof last - 1, true, written);
}

void tu_device_text_write(FILE *to) {
    bool written[HEADERS] = { false };
    static const char last[] = "loops/device.cuh";
    for (int dtype = 1; dtype <= TUTTI_C128; dtype++) {
        char name[32] = "";
        for (size_t i = 0; tutti_dtype_name(dtype)[i] != 0 && i + 1 < sizeof name; i++)
            name[i] = (char)toupper((unsigned char)tutti_dtype_name(dtype)[i]);
        fprintf(to, "#define TUTTI_%s %d\n", name, dtype);
    }
    write(to, last, sizeof last - 1, false, written);
}
