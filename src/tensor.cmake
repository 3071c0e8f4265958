# SPDX-License-Identifier: Apache-2.0
#
# libtutti-tensor, from the sources in ${tensor_sources}. Needs a CBLAS; uses oneDNN where present.
if(NOT TUTTI_HAVE_CBLAS)
  message(STATUS "libtutti-tensor is left out: no CBLAS found (install libopenblas-dev)")
  return()
endif()
add_library(tutti_tensor_objects OBJECT ${tensor_sources})
# Integers wrap.
set_source_files_properties(tensor/pointwise_kernels.c PROPERTIES COMPILE_OPTIONS "-fwrapv;-O3")
# Takes in the headers that compiled loops include.
set_source_files_properties(loops/text.c PROPERTIES COMPILE_DEFINITIONS "TUTTI_SOURCES=\"${CMAKE_CURRENT_SOURCE_DIR}\"" OBJECT_DEPENDS
  "${CMAKE_CURRENT_SOURCE_DIR}/tensor/kernel/scalar.h;${CMAKE_CURRENT_SOURCE_DIR}/tensor/kernel/vector.h;${CMAKE_CURRENT_SOURCE_DIR}/tensor/kernel/avx2.h;${CMAKE_CURRENT_SOURCE_DIR}/tensor/kernel/avx512.h;${CMAKE_CURRENT_SOURCE_DIR}/tensor/kernel/neon.h;${CMAKE_CURRENT_SOURCE_DIR}/tensor/kernel/elementary.h;${CMAKE_CURRENT_SOURCE_DIR}/tensor/dialect.h;${CMAKE_CURRENT_SOURCE_DIR}/loops/lanes.h;${CMAKE_CURRENT_SOURCE_DIR}/base/float16.h;${CMAKE_CURRENT_SOURCE_DIR}/base/element.h;${CMAKE_CURRENT_SOURCE_DIR}/loops/near.cuh;${CMAKE_CURRENT_SOURCE_DIR}/loops/device.cuh")
target_link_libraries(tutti_tensor_objects PUBLIC tutti_flags)
target_include_directories(tutti_tensor_objects PRIVATE ${CBLAS_INCLUDE_DIR})
# Squares in registers need their loops unrolled.
set_source_files_properties(tensor/transpose.c PROPERTIES COMPILE_OPTIONS "-O3")
# The kernels once per instruction set; kernels.c chooses.
file(GLOB kernel_sources CONFIGURE_DEPENDS tensor/kernel/*.c)
set(tensor_objects $<TARGET_OBJECTS:tutti_tensor_objects>)
foreach(level ${TUTTI_LEVELS})
  add_library(tutti_tensor_${level} OBJECT ${kernel_sources})
  tutti_level(tutti_tensor_${level} ${level})
  target_link_libraries(tutti_tensor_${level} PRIVATE tutti_flags)
  list(APPEND tensor_objects $<TARGET_OBJECTS:tutti_tensor_${level}>)
endforeach()
set(tensor_private_libraries ${CBLAS_LIBRARY} m)
if(TUTTI_HAVE_DNNL)
  target_include_directories(tutti_tensor_objects PRIVATE ${DNNL_INCLUDE_DIR})
  list(APPEND tensor_private_libraries ${DNNL_LIBRARY})
endif()
foreach(kind SHARED STATIC)
  string(TOLOWER ${kind} kind_name)
  set(target tutti_tensor_${kind_name})
  add_library(${target} ${kind} ${tensor_objects})
  set_target_properties(${target} PROPERTIES OUTPUT_NAME tutti-tensor VERSION ${PROJECT_VERSION} SOVERSION ${TUTTI_SOVERSION})
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_link_libraries(${target} PUBLIC tutti_${kind_name} PRIVATE ${tensor_private_libraries})
endforeach()
target_link_options(tutti_tensor_shared PRIVATE -Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/tutti-tensor.map)
set_target_properties(tutti_tensor_shared PROPERTIES LINK_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tutti-tensor.map)
add_library(Tutti::tutti_tensor ALIAS tutti_tensor_shared)
add_library(Tutti::tutti_tensor_static ALIAS tutti_tensor_static)
