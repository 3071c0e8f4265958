# SPDX-License-Identifier: Apache-2.0
#
# Flags that every target of ours shares: target `tutti_flags`.
add_library(tutti_flags INTERFACE)
target_compile_definitions(tutti_flags INTERFACE _GNU_SOURCE
  TUTTI_HAVE_HWLOC=${TUTTI_HAVE_HWLOC} TUTTI_HAVE_SODIUM=${TUTTI_HAVE_SODIUM}
  TUTTI_HAVE_CBLAS=${TUTTI_HAVE_CBLAS} TUTTI_HAVE_DNNL=${TUTTI_HAVE_DNNL})
target_include_directories(tutti_flags INTERFACE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
# -ffp-contract=off: no fused multiply-add behind our back, so that results are the same bits everywhere.
target_compile_options(tutti_flags INTERFACE -Wall -Wextra -Wpointer-arith -Wstrict-prototypes
  $<$<COMPILE_LANGUAGE:C>:-Wmissing-prototypes> -Wno-missing-field-initializers -ffp-contract=off)
# Not with a sanitizer: on instrumented code gcc warns of sizes and accesses that cannot be; the other builds have the same warnings.
if(TUTTI_WERROR AND NOT TUTTI_SANITIZE)
  target_compile_options(tutti_flags INTERFACE -Werror)
endif()
if(TUTTI_SANITIZE)
  target_compile_options(tutti_flags INTERFACE -fsanitize=${TUTTI_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=undefined)
  if(TUTTI_SANITIZE MATCHES "undefined")
    # gcc tests the address of a thread-local variable by the flags of the addition that made it, which the linker relaxes to one that sets none.
    # What goes through a null pointer ends the program anyway, with a report of the address sanitizer.
    target_compile_options(tutti_flags INTERFACE -fno-sanitize=null)
  endif()
  target_link_options(tutti_flags INTERFACE -fsanitize=${TUTTI_SANITIZE})
  target_compile_definitions(tutti_flags INTERFACE TUTTI_SANITIZED=1)
endif()
target_link_libraries(tutti_flags INTERFACE Threads::Threads)
