# SPDX-License-Identifier: Apache-2.0
#
# Writes the header for other languages: every public declaration of both libraries, after the preprocessor, without attributes; constants as one enum.
# Called as a script with COMPILER, SOURCE (the folder include/), HEADERS (names below tutti/), WORK (a scratch folder) and RESULT.
foreach(header stdbool stddef stdint stdio) # what they declare is known to every reader, and differs between systems
  file(WRITE ${WORK}/${header}.h "")
endforeach()
set(includes "")
foreach(header ${HEADERS})
  string(APPEND includes "#include <tutti/${header}>\n")
endforeach()
file(WRITE ${WORK}/all.c "${includes}")
foreach(what P dM)
  execute_process(COMMAND ${COMPILER} -E -${what} -nostdinc -I${WORK} -I${SOURCE} ${WORK}/all.c OUTPUT_FILE ${WORK}/${what}.txt RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "${COMPILER} cannot preprocess the public headers")
  endif()
endforeach()

file(STRINGS ${WORK}/dM.txt lines REGEX "^#define TU?T+I?_[A-Z0-9_]+ [(]?-?[0-9][0-9a-fx]*[)]?$")
list(SORT lines)
set(constants "")
foreach(line ${lines})
  string(REGEX REPLACE "^#define ([A-Z0-9_]+) [(]?(-?[0-9a-fx]+)[)]?$" "    \\1 = \\2,\n" line "${line}")
  string(APPEND constants "${line}")
endforeach()
string(REGEX REPLACE ",\n$" "\n" constants "${constants}")

file(READ ${WORK}/P.txt text)
string(REGEX REPLACE "__attribute__ *\\(\\([a-z_]+ *(\\([^()]*\\))?\\)\\) *" "" text "${text}")
string(REGEX REPLACE " +;" ";" text "${text}")
string(REGEX REPLACE "\n +([^ ])" "\n    \\1" text "${text}")
file(WRITE ${RESULT} "/* SPDX-License-Identifier: Apache-2.0
 *
 * Tutti for other languages: everything that libtutti and libtutti-tensor export, made from their headers by the build.
 * There is nothing to preprocess. Types of C itself (int64_t, uint64_t, size_t, bool, FILE) are left to the reader. What
 * functions promise is written in the headers themselves.
 *
 * Not here, because they are no integers: TUTTI_NON_GROUP_MEMBER is the group at address -100, TUTTI_ZERO the number -0.0.
 * Functions whose name begins with tutti_ are in libtutti, with tt_ in libtutti-tensor.
 */
enum {
${constants}};
${text}")
