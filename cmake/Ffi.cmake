# SPDX-License-Identifier: Apache-2.0
#
# share/tutti/tutti-ffi.h, the public declarations for other languages: see ffi.cmake.
file(GLOB public_headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/include/tutti/*.h)
set(ffi_headers tutti.h)
if(TARGET tutti_tensor_shared)
  list(APPEND ffi_headers tensors.h)
endif()
set(ffi_result ${PROJECT_BINARY_DIR}/tutti-ffi.h)
add_custom_command(OUTPUT ${ffi_result}
  COMMAND ${CMAKE_COMMAND} -DCOMPILER=${CMAKE_C_COMPILER} -DSOURCE=${PROJECT_SOURCE_DIR}/include "-DHEADERS=${ffi_headers}"
    -DWORK=${PROJECT_BINARY_DIR}/ffi -DRESULT=${ffi_result} -P ${PROJECT_SOURCE_DIR}/cmake/ffi.cmake
  DEPENDS ${public_headers} ${PROJECT_SOURCE_DIR}/cmake/ffi.cmake COMMENT "Writing tutti-ffi.h" VERBATIM)
add_custom_target(tutti_ffi ALL DEPENDS ${ffi_result})
install(FILES ${ffi_result} DESTINATION ${CMAKE_INSTALL_DATADIR}/tutti)
