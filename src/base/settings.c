/* SPDX-License-Identifier: Apache-2.0 */
#include "base/settings.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/auxv.h>
#include <unistd.h>

#include "base/error.h"
#include "base/nearest.h"

const tu_setting_row tu_setting_rows[TU_SETTING_COUNT] = {
#define TU_SETTING(id, environment, type, default_text, meaning) { environment, type, default_text, meaning },
#include "base/settings.def"
#undef TU_SETTING
};

/* A decimal number with an optional fraction; *end is set behind it. */
static bool number(const char *text, double *value, const char **end) {
    if (text[0] == 0 || strchr("0123456789.", text[0]) == NULL)
        return false;
    char *after;
    errno = 0;
    *value = strtod(text, &after);
    *end = after;
    return errno == 0 && after != text && *value >= 0;
}

tutti_status tu_parse_duration(const char *text, int64_t *nanoseconds) {
    static const struct {
        const char *suffix;
        double factor;
    } units[] = { { "", 1e9 }, { "s", 1e9 },    { "ms", 1e6 }, { "us", 1e3 },
                  { "ns", 1 }, { "min", 60e9 }, { "m", 60e9 }, { "h", 3600e9 } };
    double value;
    const char *suffix;
    if (number(text, &value, &suffix))
        for (size_t i = 0; i < sizeof units / sizeof units[0]; i++)
            if (strcmp(suffix, units[i].suffix) == 0 && value * units[i].factor < 9e18) {
                *nanoseconds = (int64_t)(value * units[i].factor);
                return TUTTI_OK;
            }
    return tu_error(TUTTI_ERROR_ARGUMENT, "\"%s\" is no duration; write 300, 300s, 20ms, 50us, 5min or 1h", text);
}

tutti_status tu_parse_bytes(const char *text, int64_t *bytes) {
    static const char suffixes[] = "KMGT";
    double value;
    const char *suffix;
    if (number(text, &value, &suffix)) {
        double factor = 1;
        const char *known = suffix[0] != 0 ? strchr(suffixes, suffix[0] & ~0x20) : NULL;
        if (known != NULL) {
            for (const char *p = suffixes; p <= known; p++)
                factor *= 1024;
            suffix++;
            if (suffix[0] == 'i')
                suffix++;
        }
        if ((suffix[0] == 'B' || suffix[0] == 'b') && suffix[1] == 0)
            suffix++;
        if (suffix[0] == 0 && value * factor < 9e18) {
            *bytes = (int64_t)(value * factor);
            return TUTTI_OK;
        }
    }
    return tu_error(TUTTI_ERROR_ARGUMENT, "\"%s\" is no size; write bytes, or 64K, 2M, 1G", text);
}

tutti_status tu_parse_integer(const char *text, int64_t *value) {
    char *end;
    errno = 0;
    long long parsed = strtoll(text, &end, 10);
    if (errno != 0 || end == text || *end != 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "\"%s\" is no integer", text);
    *value = parsed;
    return TUTTI_OK;
}

static tutti_status parse_flag(const char *text, int64_t *flag) {
    static const char *const words[2][4] = { { "0", "no", "false", "off" }, { "1", "yes", "true", "on" } };
    for (int value = 0; value < 2; value++)
        for (int i = 0; i < 4; i++)
            if (strcasecmp(text, words[value][i]) == 0) {
                *flag = value;
                return TUTTI_OK;
            }
    return tu_error(TUTTI_ERROR_ARGUMENT, "\"%s\" is neither yes nor no; write 1 or 0", text);
}

static tutti_status parse(tu_setting_type type, const char *text, int64_t *value) {
    switch (type) {
    case TU_SETTING_INTEGER:
        return tu_parse_integer(text, value);
    case TU_SETTING_BYTES:
        return tu_parse_bytes(text, value);
    case TU_SETTING_DURATION:
        return tu_parse_duration(text, value);
    case TU_SETTING_FLAG:
        return parse_flag(text, value);
    case TU_SETTING_TEXT:
        break;
    }
    *value = 0;
    return TUTTI_OK;
}

/* Settings that take one of a few words. */
static const struct {
    tu_setting setting;
    const char *words[5];
} choices[] = { { TU_SETTING_MULTICAST, { "auto", "software", "off" } },
                { TU_SETTING_TOGETHER, { "auto", "hopper", "plain", "off" } } };

static tutti_status check_choice(tu_setting setting, const char *text) {
    for (size_t i = 0; i < sizeof choices / sizeof choices[0]; i++) {
        if (choices[i].setting != setting || text[0] == 0)
            continue;
        char list[128] = "";
        for (size_t word = 0; choices[i].words[word] != NULL; word++) {
            if (strcmp(choices[i].words[word], text) == 0)
                return TUTTI_OK;
            size_t used = strlen(list);
            snprintf(list + used, sizeof list - used, "%s%s", used > 0 ? ", " : "", choices[i].words[word]);
        }
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: \"%s\" is none of: %s", tu_setting_rows[setting].environment, text,
                        list);
    }
    return TUTTI_OK;
}

static tutti_status assign(tu_settings *settings, tu_setting setting, const char *text, tu_setting_origin origin) {
    int64_t value = 0;
    if (text[0] != 0 && parse(tu_setting_rows[setting].type, text, &value) != TUTTI_OK) {
        tutti_error_copy error;
        tu_error_save(&error);
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: %s", tu_setting_rows[setting].environment, error.message);
    }
    tutti_status status = check_choice(setting, text);
    if (status != TUTTI_OK)
        return status;
    char *copy = strdup(text);
    if (copy == NULL)
        return tu_error_memory("a setting", strlen(text) + 1);
    free(settings->value[setting].text);
    settings->value[setting].text = copy;
    settings->value[setting].number = value;
    settings->value[setting].origin = origin;
    return TUTTI_OK;
}

/* A program that runs with more rights than whoever started it (setuid, file capabilities) takes nothing from the
 * environment: not here, and nowhere else. */
tutti_status tu_settings_load(tu_settings *settings) {
    memset(settings, 0, sizeof *settings);
    for (int i = 0; i < TU_SETTING_COUNT; i++) {
        const char *text = secure_getenv(tu_setting_rows[i].environment);
        bool given = text != NULL && text[0] != 0;
        tutti_status status = assign(settings, (tu_setting)i, given ? text : tu_setting_rows[i].default_text,
                                     given ? TU_FROM_ENVIRONMENT : TU_FROM_DEFAULT);
        if (status != TUTTI_OK) {
            tu_settings_free(settings);
            return status;
        }
    }
    return TUTTI_OK;
}

tutti_status tu_settings_set(tu_settings *settings, tu_setting setting, const char *text) {
    return assign(settings, setting, text, TU_FROM_OPTIONS);
}

void tu_settings_free(tu_settings *settings) {
    for (int i = 0; i < TU_SETTING_COUNT; i++) {
        free(settings->value[i].text);
        settings->value[i].text = NULL;
    }
}

void tu_settings_unknown(void (*found)(const char *name, const char *nearest, void *argument), void *argument) {
    if (getauxval(AT_SECURE) != 0)
        return;
    for (char **entry = environ; entry != NULL && *entry != NULL; entry++) {
        if (strncmp(*entry, "TUTTI_", 6) != 0)
            continue;
        char name[64];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(*entry, "="), *entry);
        const char *nearest = NULL;
        int least = 1000;
        for (int i = 0; i < TU_SETTING_COUNT; i++) {
            int apart = tu_letters_apart(name, tu_setting_rows[i].environment);
            if (apart < least) {
                least = apart;
                nearest = tu_setting_rows[i].environment;
            }
        }
        if (least > 0)
            found(name, nearest, argument);
    }
}
