/* SPDX-License-Identifier: Apache-2.0
 *
 * Devices as numbers and as names: the one place that prints and parses them.
 */
#include <tutti/device.h>

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/error.h"

#define CUDA_LIMIT 255 /* of indices: the next kind begins at 0x200 */

#define TEN(tens)                                                                                                     \
    "cuda:" #tens "0", "cuda:" #tens "1", "cuda:" #tens "2", "cuda:" #tens "3", "cuda:" #tens "4", "cuda:" #tens "5", \
        "cuda:" #tens "6", "cuda:" #tens "7", "cuda:" #tens "8", "cuda:" #tens "9"
#define HUNDRED(h) \
    TEN(h##0), TEN(h##1), TEN(h##2), TEN(h##3), TEN(h##4), TEN(h##5), TEN(h##6), TEN(h##7), TEN(h##8), TEN(h##9)
/* Names are constants, so that they need neither memory nor a thread's own buffer. */
static const char cuda_names[][9] = { TEN(),  TEN(1),     TEN(2),  TEN(3),  TEN(4),  TEN(5),  TEN(6),  TEN(7), TEN(8),
                                      TEN(9), HUNDRED(1), TEN(20), TEN(21), TEN(22), TEN(23), TEN(24), TEN(25) };

tutti_device tutti_device_at(tutti_device kind, int index) {
    if (kind == TUTTI_CUDA)
        return index < 0 ? TUTTI_CUDA : index < CUDA_LIMIT ? TUTTI_CUDA_AT(index) : 0;
    return (kind == TUTTI_CPU || kind == TUTTI_META) && index <= 0 ? kind : 0;
}

tutti_device tutti_device_kind(tutti_device device) {
    if (device >= TUTTI_CUDA && device <= TUTTI_CUDA + CUDA_LIMIT)
        return TUTTI_CUDA;
    return device == TUTTI_CPU || device == TUTTI_META ? device : 0;
}

int tutti_device_index(tutti_device device) {
    return tutti_device_kind(device) == TUTTI_CUDA ? device - TUTTI_CUDA - 1 : -1;
}

const char *tutti_device_name(tutti_device device) {
    if (device == 0)
        return "default";
    if (device == TUTTI_CPU)
        return "cpu";
    if (device == TUTTI_META)
        return "meta";
    if (tutti_device_kind(device) != TUTTI_CUDA)
        return "?";
    return device == TUTTI_CUDA ? "cuda" : cuda_names[tutti_device_index(device)];
}

tutti_status tutti_device_parse(const char *name, tutti_device *device) {
    if (name == NULL || device == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_device_parse needs a name and a place for its result");
    static const tutti_device plain[] = { 0, TUTTI_CPU, TUTTI_META, TUTTI_CUDA };
    for (size_t i = 0; i < sizeof plain / sizeof plain[0]; i++)
        if (strcasecmp(name, tutti_device_name(plain[i])) == 0) {
            *device = plain[i];
            return TUTTI_OK;
        }
    for (int index = 0; index < CUDA_LIMIT; index++)
        if (strcasecmp(name, cuda_names[index]) == 0) {
            *device = TUTTI_CUDA_AT(index);
            return TUTTI_OK;
        }
    return tu_error(TUTTI_ERROR_ARGUMENT, "\"%.32s\" is no device: there are cpu, meta, cuda and cuda:0 to cuda:%d",
                    name, CUDA_LIMIT - 1);
}
