/* SPDX-License-Identifier: Apache-2.0
 *
 * The settings: one table (settings.def) feeds environment parsing, `tutti info`, docs/settings.md and the warning
 * about unknown TUTTI_ variables. World options win over the environment, the environment over the default.
 */
#ifndef TU_BASE_SETTINGS_H
#define TU_BASE_SETTINGS_H

#include <stdbool.h>
#include <stdint.h>

#include <tutti/status.h>

#include "base/error.h"

typedef enum tu_setting_type {
    TU_SETTING_TEXT,
    TU_SETTING_INTEGER,
    TU_SETTING_BYTES,    /* "64K", "2M", "1G" or plain bytes */
    TU_SETTING_DURATION, /* "300", "300s", "20ms", "5min"; plain is seconds; kept in nanoseconds */
    TU_SETTING_FLAG      /* 0/1, no/yes, false/true, off/on */
} tu_setting_type;

typedef enum tu_setting_origin {
    TU_FROM_DEFAULT,
    TU_FROM_ENVIRONMENT,
    TU_FROM_OPTIONS
} tu_setting_origin;

/* One enumerator per row: TU_SETTING_TIMEOUT, … */
typedef enum tu_setting {
#define TU_SETTING(id, environment, type, default_text, meaning) TU_SETTING_##id,
#include "base/settings.def"
#undef TU_SETTING
    TU_SETTING_COUNT
} tu_setting;

typedef struct tu_setting_row {
    const char *environment; /* "TUTTI_TIMEOUT" */
    tu_setting_type type;
    const char *default_text; /* "" means unset */
    const char *meaning;
} tu_setting_row;

extern const tu_setting_row tu_setting_rows[TU_SETTING_COUNT];

typedef struct tu_settings {
    struct {
        char *text;     /* never NULL; "" when unset */
        int64_t number; /* INTEGER, BYTES, DURATION (ns) and FLAG; 0 when unset */
        tu_setting_origin origin;
    } value[TU_SETTING_COUNT];
} tu_settings;

/* From defaults and the environment. A value that does not parse is TUTTI_ERROR_ARGUMENT naming variable, value and
 * what is understood. */
tutti_status tu_settings_load(tu_settings *settings);
tutti_status tu_settings_set(tu_settings *settings, tu_setting setting, const char *text); /* origin: options */
void tu_settings_free(tu_settings *settings);

static inline const char *tu_settings_text(const tu_settings *settings, tu_setting setting) {
    return settings->value[setting].text;
}
static inline int64_t tu_settings_number(const tu_settings *settings, tu_setting setting) {
    return settings->value[setting].number;
}

/* Names of TUTTI_ variables in the environment that no row knows, each with the nearest known name: the callback is
 * called once per name. */
void tu_settings_unknown(void (*found)(const char *name, const char *nearest, void *argument), void *argument);

/* The parsers, for others' use (tools, bench). */
TU_SHARED tutti_status tu_parse_duration(const char *text, int64_t *nanoseconds);
TU_SHARED tutti_status tu_parse_bytes(const char *text, int64_t *bytes);
tutti_status tu_parse_integer(const char *text, int64_t *number);

#endif
