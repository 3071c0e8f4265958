/* SPDX-License-Identifier: Apache-2.0 */
#include "base/instructions.h"

#include <tutti/world.h>

#include "../harness.h"
#include "kernel/kernel.h"

static const char *absent(void) {
    for (tu_instructions level = TU_REFERENCE; level < TU_INSTRUCTIONS_END; level++)
        if (!tu_instructions_present(level))
            return tu_instructions_name(level);
    return NULL;
}

TEST(without_a_setting_the_best_of_the_machine_is_used) {
    unsetenv("TUTTI_ISA");
    CHECK_OK(tu_instructions_choose(NULL));
    tu_instructions level = tu_instructions_get();
    CHECK(level != TU_REFERENCE); /* each processor that Tutti is tested on has something better */
    CHECK(!tu_instructions_asked());
    for (tu_instructions better = level + 1; better < TU_INSTRUCTIONS_END; better++)
        CHECK(!tu_instructions_present(better));
    CHECK_TEXT(tu_kernels_name(), tu_instructions_name(level));
}

TEST(the_environment_limits_every_kernel) {
    setenv("TUTTI_ISA", "reference", 1);
    CHECK_TEXT(tu_kernels_name(), "reference");
    CHECK(tu_instructions_asked());
    CHECK_OK(tu_instructions_choose(NULL));
}

TEST(a_world_option_limits_the_process) {
    unsetenv("TUTTI_ISA");
    tutti_world *world;
    tutti_world_options options = TUTTI_WORLD_OPTIONS_INIT;
    options.settings = "TUTTI_ISA=reference";
    CHECK_OK(tutti_world_open(&options, &world));
    CHECK_TEXT(tu_kernels_name(), "reference");
    CHECK_OK(tutti_world_close(world));
}

TEST(a_second_choice_that_differs_is_an_error_that_names_both) {
    unsetenv("TUTTI_ISA");
    CHECK_OK(tu_instructions_choose(NULL));
    CHECK_STATUS(tu_instructions_choose("reference"), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("reference");
    CHECK_MESSAGE(tu_instructions_name(tu_instructions_get()));
    CHECK_OK(tu_instructions_choose(tu_instructions_name(tu_instructions_get())));
}

TEST(what_the_machine_lacks_is_an_error_that_names_what_it_has) {
    setenv("TUTTI_ISA", absent(), 1);
    tutti_world *world;
    CHECK_STATUS(tutti_world_open(NULL, &world), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE(absent());
    CHECK_MESSAGE("TUTTI_ISA");
    CHECK_MESSAGE("reference");
}

TEST(a_word_that_is_no_instruction_set_is_an_error) {
    setenv("TUTTI_ISA", "abacus", 1);
    tutti_world *world;
    CHECK_STATUS(tutti_world_open(NULL, &world), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("abacus");
}
