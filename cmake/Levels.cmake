# SPDX-License-Identifier: Apache-2.0
#
# Instruction sets ("levels") of the tensor library's kernels. A target of kernels is compiled once per level in
# ${TUTTI_LEVELS}: tutti_level(target level) gives it the compiler's flags, TU_LEVEL (its name) and TU_LEVEL_HEADER (its primitives).
set(TUTTI_LEVELS reference)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND TUTTI_LEVELS avx2 avx512)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64")
  list(APPEND TUTTI_LEVELS neon)
endif()
set(tutti_level_flags_avx2 -mavx2 -mfma -mf16c)
set(tutti_level_flags_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mprefer-vector-width=512)

function(tutti_level target level)
  set(header ${level})
  if(level STREQUAL "reference")
    set(header scalar)
  endif()
  target_compile_definitions(${target} PRIVATE TU_LEVEL=${level} TU_LEVEL_HEADER="tensor/kernel/${header}.h")
  # -O3 unrolls loops over registers; no function here looks at errno.
  target_compile_options(${target} PRIVATE $<$<NOT:$<CONFIG:Debug>>:-O3> -fno-math-errno ${tutti_level_flags_${level}})
  if(TUTTI_SANITIZE MATCHES "undefined" AND NOT level STREQUAL "reference")
    # Minutes of compiling; the reference, with the same arithmetic, is checked.
    target_compile_options(${target} PRIVATE -fno-sanitize=undefined)
  endif()
endfunction()
