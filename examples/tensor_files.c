/* SPDX-License-Identifier: Apache-2.0
 *
 * Files and other libraries: a small model is saved as safetensors, loaded again by name, and one of its tensors goes
 * to NumPy as .npy. DLPack lends its memory to another library without a copy.
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <tutti/dlpack.h>
#include <tutti/io.h>
#include <tutti/ops.h>

int main(void) {
    char folder[] = "/tmp/tutti-files-XXXXXX", model_path[64], array_path[64];
    if (mkdtemp(folder) == NULL) {
        perror(folder);
        return 1;
    }
    snprintf(model_path, sizeof model_path, "%s/model.safetensors", folder);
    snprintf(array_path, sizeof array_path, "%s/weight.npy", folder);

    tt_scope scope = tt_scope_open();
    tt_seed(1, 0);
    tt_tensor *weight = tt_randn(tt_shape(3, 4), TUTTI_F32, NULL),
              *bias = tt_to(tt_ones(tt_shape(3), TUTTI_F32, NULL), TUTTI_BF16);
    const char *names[] = { "layer.weight", "layer.bias" }, *keys[] = { "step" }, *values[] = { "100" };
    tt_metadata notes = { 1, keys, values };
    tt_save_safetensors_with(tt_tensors(weight, bias), names, notes, model_path);

    tt_named_list model = tt_load_safetensors(model_path); /* its tensors and names belong to the scope */
    tt_metadata read = tt_load_metadata(model_path);
    for (size_t i = 0; i < model.count; i++) {
        printf("%s:\n", model.names[i]);
        tt_print(model.at[i], stdout);
    }
    if (read.count > 0)
        printf("saved at step %s\n", tt_metadata_get(read, "step"));

    tt_tensor *again = tt_named(model, "layer.weight"); /* or an error that lists the names there are */
    tt_save_npy(tt_transpose(again, 0, 1), array_path); /* numpy.load reads it */
    bool same = tt_equal(tt_transpose(tt_load_npy(array_path), 0, 1), weight);

    tt_dlpack_managed *lent = tt_dlpack_export(again, 0);
    tutti_status status = tt_scope_close(&scope); /* the first error of all the lines above, if there was one */
    if (status == TUTTI_OK) {
        printf("lent: %d dimensions at %s\n", (int)lent->tensor.ndim,
               lent->tensor.data != NULL ? "our own memory" : "nothing");
        lent->deleter(lent); /* the memory lived until here */
    } else {
        fprintf(stderr, "%s: %s\n", tutti_status_name(status), tutti_error_message());
    }
    unlink(model_path);
    unlink(array_path);
    rmdir(folder);
    printf("what was loaded is %s\n", same ? "what was saved" : "something else");
    return status == TUTTI_OK && same ? 0 : 1;
}
